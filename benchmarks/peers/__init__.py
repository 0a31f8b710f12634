"""Adapters that call other libraries' kernels like mxspec's ops, for `python -m mxspec bench --peers`.

There is one file for each library. An adapter has the signature of its op and returns the op's outputs. The outputs are
views of the library's outputs. An adapter adds no kernel of its own, unless the library needs one, such as a fill with
zeros. If the op changes an argument in place, the adapter
does too. If a library needs another layout, the adapter's `prepare` makes it, and its time does not count. mxspec
imports nothing from here. Each adapter imports its library when it is called.

A file has `LIBRARY` (the labels of its adapters begin with this name) and `version()`. This package finds the files by
itself.

The adapters ran with torch 2.11 and CUDA 13 on an H200: `pip install --no-deps torchao==0.18.0 sgl-deep-gemm==0.1.2
apache-tvm-ffi==0.1.9 fbgemm-gpu-genai==1.6.0`. The adapters of TransformerEngine, and all adapters that need Blackwell,
follow the libraries' sources and were not run.
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
