"""Helion's MX matmuls of bf16 values: rows whose values are no bf16 numbers are computed again, and no other rows."""

import os
from functools import partial

import pytest
import torch

import mxspec
from mxspec import check, dispatch
from mxspec.cases import mx_gemm as dense
from mxspec.cases import mx_grouped_gemm as grouped
from mxspec.cases import mx_grouped_gemm_wgrad as wgrad
from mxspec.reference.common.matmul import MIN_SQNR_DB
from mxspec.reference.to_blocked_k_groups import to_blocked_k_groups

if not dispatch.has_kernel("mx_gemm", "helion"):
    pytest.skip("helion is not installed", allow_module_level=True)
try:
    from mxspec.helion_kernels.tiles import mx_by_memory as kernel
    from mxspec.helion_kernels.tiles.mx_matmul import scale_arguments
except ImportError as error:
    pytest.skip(f"helion cannot be imported: {error}", allow_module_level=True)

# By code format: the first and the last scale under which each value is 0, a normal bf16 number, Inf or NaN.
LIMITS = {torch.float8_e4m3fn: (10, 246), torch.float8_e5m2: (17, 239)}
runs_helion = pytest.mark.skipif(
    not torch.cuda.is_available() and not dispatch.interpreters(), reason="needs a GPU or an interpreter"
)


def values_for_wgrad(codes, scale, flags):
    """The values of one group's codes."""
    module = dispatch.kernel_module("mx_grouped_gemm_wgrad", "helion")
    plan = torch.tensor([[0, 0, 1, 0]], dtype=torch.int32, device=codes.device)  # block 0 of group 0
    return module._bf16_values(codes, scale_arguments(scale, False), False, plan, 1, flags, kernel.FIRST_FLAG, "dy")


def values_of_rows(codes, scale, flags):
    return kernel.bf16_values(codes, scale, False, flags, kernel.FIRST_FLAG, "a")


@runs_helion
@pytest.mark.parametrize("write", [values_of_rows, values_for_wgrad])
@pytest.mark.parametrize("dtype", list(LIMITS), ids=str)
def test_flags_say_which_scales_lead_out_of_bf16(dtype, write):
    """The 256 codes under a scale, one in a row: the scales on both sides of each limit, and the ends of the range."""
    device, limits = check.default_device(), LIMITS[dtype]
    bytes_ = torch.tensor(sorted({0, 127, 254, 255, *(limit + by for limit in limits for by in (-1, 0, 1))}))
    codes = torch.zeros(256 * len(bytes_), 32, dtype=torch.uint8)
    codes[:, 7] = torch.arange(256).repeat(len(bytes_))
    scale = bytes_.to(torch.uint8).repeat_interleave(256)[:, None]
    codes, scale = codes.view(dtype).to(device), scale.view(torch.float8_e8m0fnu).to(device)
    flags = torch.zeros(kernel.FIRST_FLAG + len(codes), dtype=torch.int32, device=device)
    got = write(codes, scale, flags)
    exact = dispatch.reference("mx_dequantize")(codes, scale, out_dtype=torch.float32).double()
    of_row = flags[kernel.FIRST_FLAG :].bool()
    outside = (bytes_ < limits[0]) | ((bytes_ > limits[1]) & (bytes_ < 255))
    # A code of 0 needs no flag. A flag for NaN and Inf does no harm.
    needed = (outside.repeat_interleave(256).to(device)[:, None] & codes.double().isfinite() & (codes.double() != 0))[
        :, 7
    ]
    assert of_row[needed].all()
    assert not of_row[(codes.double() == 0)[:, 7]].any()
    assert not of_row[~outside.repeat_interleave(256).to(device)].any()
    assert bool(flags[0])
    assert got[~of_row].double().nan_to_num(3.0).equal(exact[~of_row].nan_to_num(3.0))


@runs_helion
@pytest.mark.parametrize("op", ["mx_gemm", "mx_grouped_gemm"])
@pytest.mark.parametrize("row", [0, 129])
@pytest.mark.parametrize(("first", "beyond", "other"), [(1, 254, 60), (3, 254, 60), (1, 0, 200), (3, 0, 200)])
def test_only_a_row_with_a_flag_is_computed_again(op, row, first, beyond, other):
    """One operand has one row of scales at an end of the range, and the other has ordinary scales."""
    if op == "mx_gemm":
        a, a_scale, b, b_scale = dense.made(150, 136, 96, "plain")
        operands, offs = [a, a_scale, b, b_scale], ()
    else:
        *operands, offs = grouped.made([130, 0, 20], 6, 136, 96, "plain")
        offs = (offs,)
    operands = [t.clone() if t.is_contiguous() else t.mT.clone().mT for t in operands]
    scales, others = operands[first].view(torch.uint8), operands[4 - first].view(torch.uint8)
    others[:] = other
    scales.view(-1, scales.shape[-1])[row] = beyond
    if beyond == 0:  # so small that bf16 would lose the codes
        codes = operands[first - 1].view(torch.uint8)
        codes.view(-1, codes.shape[-1])[row] = 3
    args = check.on_device(check.default_device(), (*operands, *offs))
    kwargs = {"scale_layout": "plain", "out_dtype": torch.float32}
    with check.poisoned(0xFF):
        out = getattr(mxspec, op)(*args, **kwargs, backend="helion")
    assert check.difference((out,), (dispatch.reference(op)(*args, **kwargs),), MIN_SQNR_DB) is None


@runs_helion
@pytest.mark.parametrize("layout", ["plain", "blocked"])
@pytest.mark.parametrize("row", [0, 129])
@pytest.mark.parametrize(("first", "beyond", "code"), [(1, 254, 3), (3, 254, 3), (1, 0, 3), (3, 0, 3), (1, 254, 0)])
def test_only_a_row_with_a_flag_in_its_group_is_summed_again(layout, row, first, beyond, code):
    """One row of one operand has such scales in a block of the last group of three. No other sum changes its bits.

    The codes of this block are 3 or 0. A block of zeros raises no flag.
    """
    sizes, rest, N, K = [160, 0, 96], 32, 136, 300  # the operands have other numbers of row tiles
    args, kwargs = wgrad.made(sizes, rest, N, K, "plain"), {"scale_layout": layout, "out_dtype": torch.float32}
    outs = []
    for change in (False, True):
        *operands, offs = (t.clone() if t.is_contiguous() else t.mT.clone().mT for t in args)
        operands[3] = operands[3].mT.clone().mT  # other strides than those of dy
        operands[first].view(torch.uint8)[:, : sum(sizes) // 32] = 127
        operands[4 - first].view(torch.uint8)[:, : sum(sizes) // 32] = 60 if beyond == 254 else 200
        if change:
            operands[first].view(torch.uint8)[row, 6:7] = beyond
        operands[first - 1].view(torch.uint8)[192:224, row] = code  # so small that bf16 would lose it under 2^-127
        if layout == "blocked":
            for i in (1, 3):
                operands[i] = to_blocked_k_groups(operands[i], offs // 32)[0]
        given = check.on_device(check.default_device(), (*operands, offs))
        given = *given[:4], given[4].repeat_interleave(3)[::3]
        with check.poisoned(0xFF):
            outs.append(mxspec.mx_grouped_gemm_wgrad(*given, **kwargs, backend="helion"))
        want = dispatch.reference("mx_grouped_gemm_wgrad")(*given, **kwargs)
        assert check.difference((outs[-1],), (want,), MIN_SQNR_DB) is None
    changed = outs[0].view(torch.int32) != outs[1].view(torch.int32)
    summed_again = changed[2, row] if first == 1 else changed[2, :, row]
    assert summed_again.any() == (code != 0)
    summed_again[:] = False
    assert not changed.any()


@pytest.mark.skipif(os.environ.get("HELION_INTERPRET") != "1", reason="needs HELION_INTERPRET=1")
@pytest.mark.parametrize("layout", ["plain", "blocked"])
@pytest.mark.parametrize("op", ["mx_gemm", "mx_grouped_gemm", "mx_grouped_gemm_wgrad"])
def test_the_kernel_for_blackwell_multiplies_codes(op, layout, monkeypatch):
    """Without a GPU the op runs the kernel for Hopper. Helion's interpreter has steps of one block, not of four."""
    module = dispatch.kernel_module(op, "helion")
    monkeypatch.setattr(module, "MX_BLOCK_SIZE", 0)
    monkeypatch.setattr(kernel, "launch", None)  # the kernels for Hopper would call these two
    monkeypatch.setattr(module, "_of_values", None)
    args = {
        "mx_gemm": partial(dense.made, 150, 136, 160),
        "mx_grouped_gemm": partial(grouped.made, [130, 0, 20], 6, 136, 160),
        "mx_grouped_gemm_wgrad": partial(wgrad.made, [160, 0, 96], 32, 136, 150),
    }[op](layout)
    kwargs = {"scale_layout": layout, "out_dtype": torch.float32}
    with check.poisoned(0xFF):
        out = getattr(mxspec, op)(*args, **kwargs, backend="helion")
    assert check.difference((out,), (dispatch.reference(op)(*args, **kwargs),), MIN_SQNR_DB) is None
