"""Helion kernels, one file an op, for Hopper (sm_90) and Blackwell (sm_100).

With HELION_INTERPRET=1, set before this package is imported, they run on CPU tensors as eager torch, a whole
dimension a tile; with TRITON_INTERPRET=1 the Triton code that Helion generates runs there, with real tiles.
"""

import os

from mxspec import interpreters
from mxspec.interpreters.accelerations import multiply_fp8_as_fp32

INTERPRETERS = ("HELION_INTERPRET", "TRITON_INTERPRET")

interpreters.install()
if os.environ.get("HELION_INTERPRET") == "1":
    multiply_fp8_as_fp32()
