"""Checkpoints of block-scaled weights on a CPU: inspect, convert from one family to another, and verify, bit by bit.

- `inspect` says what a checkpoint holds, what is wrong with it, and which loaders read it as it is meant.
- `convert` writes a checkpoint in another family.
- `save` writes a live model's layers as the codes that they compute with.
- `verify` compares two checkpoints, or a live module and a checkpoint.
- `retype`, `mxfp4_to_fp8_blocks`, `mxfp4_to_nvfp4` and `blocks_to_rows` change the format of tensors and keep every
  value, or say which blocks would change.
"""

from mxspec.checkpoint.convert import convert
from mxspec.checkpoint.files import Problem
from mxspec.checkpoint.inspect import Inspection, inspect
from mxspec.checkpoint.lossless import NotLossless, blocks_to_rows, retype
from mxspec.checkpoint.mxfp4 import mxfp4_to_fp8_blocks
from mxspec.checkpoint.nvfp4 import mxfp4_to_nvfp4
from mxspec.checkpoint.reading import CheckpointError
from mxspec.checkpoint.save import save
from mxspec.checkpoint.verify import Finding, Verdict, verify

__all__ = [
    "CheckpointError",
    "Finding",
    "Inspection",
    "NotLossless",
    "Problem",
    "Verdict",
    "blocks_to_rows",
    "convert",
    "inspect",
    "mxfp4_to_fp8_blocks",
    "mxfp4_to_nvfp4",
    "retype",
    "save",
    "verify",
]
