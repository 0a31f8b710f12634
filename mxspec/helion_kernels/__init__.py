"""Helion kernels for Hopper (sm_90) and Blackwell (sm_100). Each op has one file.

Two variables, set before this package is imported, run the kernels on CPU tensors:

- HELION_INTERPRET=1 runs them as eager torch, in Helion's ref mode. A tile is then a whole dimension.
- TRITON_INTERPRET=1 runs the Triton code that Helion generates, with real tiles.
"""

import os

from mxspec import interpreters
from mxspec.interpreters.accelerations import multiply_as_fp32

INTERPRETERS = ("HELION_INTERPRET", "TRITON_INTERPRET")
PLANNED = True  # as in mxspec.triton_kernels: a kernel of Helion has one configuration for each device

interpreters.install()
if os.environ.get("HELION_INTERPRET") == "1":
    multiply_as_fp32()
