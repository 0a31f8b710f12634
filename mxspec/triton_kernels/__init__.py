"""Triton kernels, one file an op, for Hopper (sm_90) and Blackwell (sm_100).

With TRITON_INTERPRET=1, set before this package is imported, they run on CPU tensors.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from mxspec.triton_kernels import _interpreter_casts

    _interpreter_casts.install()
