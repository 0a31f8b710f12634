"""Other libraries' kernels behind mxspec's contracts, for `python -m mxspec bench --peers`: a file a library.

An adapter has its op's signature and gives the op's outputs, as views of what the library wrote and without a kernel
of its own. If the op changes an argument in place, so does the adapter. Where a library wants a layout of its own, the
adapter's `prepare` makes it, and is not timed. Nothing here is imported by mxspec. Each adapter imports its library
when it is called.

A file has `LIBRARY`, the name with which its adapters' labels begin, and `version()`. It is found by its name.

Read with torch 2.11 and CUDA 13 on an H200: `pip install --no-deps torchao==0.18.0 sgl-deep-gemm==0.1.2
apache-tvm-ffi==0.1.9 fbgemm-gpu-genai==1.6.0`. The adapters of TransformerEngine, and all that need Blackwell, follow
the libraries' sources and were not run.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

from ._common import ADAPTERS, Unsupported

__all__ = ["ADAPTERS", "LIBRARIES", "Unsupported"]

LIBRARIES: dict[str, Callable[[], str]] = {}  # a library's name -> its version, or an ImportError
for _file in pkgutil.iter_modules(__path__):
    if not _file.name.startswith("_"):
        _module = importlib.import_module(f"{__name__}.{_file.name}")
        LIBRARIES[_module.LIBRARY] = _module.version
