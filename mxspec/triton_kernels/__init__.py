"""Triton kernels, one file an op, for Hopper (sm_90) and Blackwell (sm_100).

With TRITON_INTERPRET=1, set before this package is imported, they run on CPU tensors.
"""

from mxspec import interpreters

INTERPRETERS = ("TRITON_INTERPRET",)

interpreters.install()
