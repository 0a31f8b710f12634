"""Index arithmetic past 2^31 elements, without the memory: only a grid's first and last programs run.

The input is one row, repeated 2^20 times with stride 0. Pages of the outputs that no program writes are never touched.
"""

import os
from functools import partial
from unittest import mock

import pytest
import torch

from mxspec import cases, check, dispatch
from mxspec.cases.common.requantizers import codes_far_apart
from mxspec.cases.common.token_groups import far_apart
from mxspec.check import _memory
from mxspec.spec import outputs_of

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs TRITON_INTERPRET=1 (on a GPU the conformance cases run whole)",
)
LARGE = [
    pytest.param(op, case, id=f"{op}-{case.name}")
    for op in dispatch.ops()
    if dispatch.has_kernel(op, "triton")
    for case in cases.of(op).cases()  # large cases are written by hand
    if "large" in case.flags
]


def ends(last):
    """`range`, but of a long one only the first two numbers and the last `last`."""

    def without_the_middle(count, *rest):
        return range(count, *rest) if rest or count < 64 else [0, 1, *range(count - last, count)]

    return without_the_middle


@pytest.mark.turns(16)
@pytest.mark.parametrize(("op", "case"), LARGE)
def test_the_last_programs_write_the_last_rows(op, case):
    args = case.args()
    assert args[0].numel() * (2 if args[0].dtype == torch.float4_e2m1fn_x2 else 1) > 2**31  # two codes in a byte
    problem = problem_at_the_end(op, case, args, last=4)
    # The last 4 programs may not have written everything that is compared. The last 36 have: in two dimensions they are
    # thousands.
    if problem:
        problem = problem_at_the_end(op, case, args, last=36)
    assert problem is None, problem


def problem_at_the_end(op, case, args, last):
    from triton.runtime import interpreter

    length = args[0].shape[args[0].stride().index(0)]
    with (
        mock.patch.object(interpreter, "range", ends(last), create=True),
        mock.patch.object(_memory, "fill_bytes", side_effect=fill_end) as filled,
        check.poisoned(0x5A),
    ):
        got = outputs_of(dispatch.public(op)(*args, backend="triton", **case.kwargs))
    assert filled.called  # otherwise every page was touched
    # All rows are equal, and padded groups end in zeros. So the last bytes are those of a small call with the same
    # ragged end.
    small = [shortened(arg, length, length % 128 + 128) for arg in args]
    expected = outputs_of(dispatch.reference(op)(*small, **case.kwargs))
    for g, e in zip(got, expected, strict=True):
        # Offsets have no shorter form, and are small enough to be compared in other tests.
        if e.dtype in (torch.int32, torch.int64):
            continue
        if not g.is_contiguous():  # column-major: compare in the order of memory
            g, e = g.mT, e.mT
        # The part that ends as the large output ends: a tile, or the last bytes of a row, which the programs of 8 tiles
        # of blocked scales have written.
        tail = slice(-512 if e.ndim < 2 else -min(256, e.shape[-1]), None)
        if problem := check.difference((g.view(-1)[tail],), (e.reshape(-1)[tail],)):
            return problem
    return None


def fill_end(t, byte):
    """Poison only the bytes that are compared. All other pages are never touched."""
    whole = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())
    whole[-4096:].fill_(byte)


def shortened(t, length, rows):
    """The first rows of `length` rows. Blocked scales are flat: the row tiles that hold these rows. Scales of 128x128
    blocks have a row for 128 rows.

    A bias has no tokens, so it stays, and so does the magnitude of the only group.
    """
    if not isinstance(t, torch.Tensor) or (t.shape == (1,) and t.dtype == torch.float32):
        return t
    if t.dtype == torch.int32:  # the only group, with all of the rows
        return t.new_full((1,), rows) if int(t) == length else t
    whole, part = -(-length // 128), -(-rows // 128)
    if t.ndim == 1:
        return t[: t.numel() // whole * part]
    if whole in t.shape:
        return t.narrow(t.shape.index(whole), 0, part)
    return t.narrow(t.shape.index(length), 0, rows) if length in t.shape else t


FAR = 2**28  # eight times this stride is 2^31
rows_apart = partial(far_apart, apart=FAR)


def codes_apart():
    scale = dispatch.reference("fp8_quantize_1x128")(torch.ones(16, 128), axis=-2)[1]
    return codes_far_apart(16, 128, FAR), scale


def packed_apart():
    qdata = codes_far_apart(8, 128, FAR).view(torch.uint8).view(torch.float4_e2m1fn_x2)
    return qdata, dispatch.reference("nvfp4_quantize")(torch.ones(16, 128), axis=-2)[1], torch.tensor(0.5)


ONE_GROUP = torch.tensor([16], dtype=torch.int32)
FAR_CALLS = {
    "fp8_quantize_128x128": lambda: ((rows_apart(16, 128),), {"with_transpose": True}),
    "fp8_quantize_1x128": lambda: ((rows_apart(16, 128),), {"axis": -2}),
    "fp8_quantize_k_groups": lambda: ((rows_apart(16, 128), ONE_GROUP), {}),
    "fp8_dequantize": lambda: (codes_apart(), {"axis": -2}),
    "mx_quantize": lambda: ((rows_apart(32, 128),), {"axis": -2}),
    "mx_quantize_rowcol": lambda: ((rows_apart(32, 128),), {}),
    "nvfp4_quantize": lambda: ((rows_apart(16, 128),), {"axis": -2}),
    "nvfp4_quantize_groups": lambda: ((rows_apart(16, 128), ONE_GROUP), {"axis": -2}),
    "nvfp4_quantize_stochastic": lambda: ((rows_apart(16, 128), torch.tensor([1, 2])), {"axis": -2}),
    "hadamard_16": lambda: ((rows_apart(16, 128),), {"axis": -2}),
    "nvfp4_fake_quantize": lambda: ((rows_apart(16, 128),), {"axis": -2}),
    "nvfp4_fake_quantize_rowcol_groups": lambda: ((rows_apart(16, 128), ONE_GROUP), {"signs": 0xD7E8}),
    "nvfp4_dequantize": lambda: (packed_apart(), {"axis": -2}),
    "swiglu_backward_mx_quantize_rowcol_groups": lambda: (
        (rows_apart(16, 256), rows_apart(16, 128), ONE_GROUP),
        {},
    ),
}


@pytest.mark.parametrize("op", FAR_CALLS)
def test_rows_2_to_the_28_apart(op):
    """A kernel that loads several rows in one thread multiplies the stride by 8."""
    args, kwargs = FAR_CALLS[op]()
    got = outputs_of(dispatch.public(op)(*args, backend="triton", **kwargs))
    expected = outputs_of(dispatch.reference(op)(*args, **kwargs))
    assert check.difference(got, expected) is None
