"""Triton kernels for Hopper (sm_90) and Blackwell (sm_100). Each op has one file.

With TRITON_INTERPRET=1, set before this package is imported, the kernels run on CPU tensors.
"""

from mxspec import interpreters

INTERPRETERS = ("TRITON_INTERPRET",)
# What a host function does follows from shapes, strides, dtypes, devices, options, and addresses modulo 16. It never
# follows from the values of a tensor or from a count of calls. So `mxspec.plans` may repeat it.
PLANNED = True

interpreters.install()
