"""Triton kernels for Hopper (sm_90) and Blackwell (sm_100). Each op has one file.

With TRITON_INTERPRET=1, set before this package is imported, the kernels run on CPU tensors.
"""

from mxspec import interpreters

INTERPRETERS = ("TRITON_INTERPRET",)

interpreters.install()
