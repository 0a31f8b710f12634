"""`import mxspec.nn` takes about as long as `import torch`."""

import subprocess
import sys

import torch

from mxspec.nn import _formats


def test_it_leaves_the_compiler_out():
    """torch._dynamo takes longer to import than torch, and few programs that use a layer compile it."""
    code = "import sys, mxspec.nn, mxspec.checkpoint; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_the_compiler_takes_as_a_constant_is_marked_as_pytorch_marks_it():
    @torch.compiler.assume_constant_result
    def marked():
        return 0

    assert vars(_formats._is_hopper) == vars(marked) != {}
