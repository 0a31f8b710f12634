"""The random bytes of a block: the words of Philox in Triton are those of the reference."""

import pytest
import torch

from mxspec import check, dispatch
from mxspec.reference.common.philox import bytes_of_blocks

if check.default_device().type == "cpu" and "TRITON_INTERPRET" not in dispatch.interpreters():
    pytest.skip("needs a GPU or an interpreter", allow_module_level=True)

import triton
import triton.language as tl

from mxspec.triton_kernels.common.nvfp4_numerics import bytes_of_words, random_words

DEVICE = check.default_device()


@triton.jit
def _bytes(state, out, BLOCK: tl.constexpr):
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w0, w1, w2, w3 = random_words(state, 1, number)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(BLOCK, 4)
    tl.store(out + number[:, None] * 16 + tl.arange(0, 16)[None, :], bytes_of_words(words))


@pytest.mark.parametrize(
    ("seed", "offset"),
    [(0, 0), (-1, -1), (7, 2**32 + 5), (2**40 + 3, -5), (-(2**63), 2**63 - 1), (0x299F31D0A4093822, 0x5A308D3243F6A88)],
)
def test_the_bytes_are_the_references(seed, offset):
    state = torch.tensor([seed, offset])
    out = torch.full((512, 16), -1, dtype=torch.int32, device=DEVICE)
    _bytes[(4,)](state.to(DEVICE), out, 128)
    assert torch.equal(out.cpu(), bytes_of_blocks(state, (512,)))
