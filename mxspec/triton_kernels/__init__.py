"""Triton kernels for Hopper (sm_90) and Blackwell (sm_100). Each op has one file.

With TRITON_INTERPRET=1, set before this package is imported, the kernels run on CPU tensors.
"""

from mxspec import interpreters

INTERPRETERS = ("TRITON_INTERPRET",)
# The launches of a host function depend only on shapes, strides, dtypes, devices, options, and addresses modulo 16.
# They never depend on the values of a tensor or on a count of calls. So `mxspec.plans` may repeat the launches.
PLANNED = True

interpreters.install()
