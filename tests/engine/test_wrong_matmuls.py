"""The judge finds wrong matmuls by the cases that are written by hand. Each matmul here is a damaged reference."""

from typing import Any

import pytest
import torch

from mxspec import dispatch
from tests.helpers import finding

MX = "mx_gemm", "mx_grouped_gemm", "mx_grouped_gemm_wgrad"
FP8 = "fp8_gemm", "fp8_grouped_gemm", "fp8_grouped_gemm_wgrad"
NVFP4 = "nvfp4_gemm", "nvfp4_grouped_gemm", "nvfp4_grouped_gemm_wgrad"


def of_bytes(changed):
    """The damage to FP8 codes: `changed(bytes, whether they are e4m3)`."""

    def damage(t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or t.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            return t
        out = t.clone()
        out.view(torch.uint8).copy_(changed(t.view(torch.uint8), t.dtype == torch.float8_e4m3fn))
        return out

    return damage


SUBNORMAL_IS_0 = of_bytes(lambda b, e4m3: (b & 0x80).where((b & 0x7F) < (8 if e4m3 else 4), b))
NEGATIVE_NAN_IS_A_NUMBER = of_bytes(lambda b, e4m3: (b - 1).where(b == 0xFF, b) if e4m3 else b)
NAN_IS_INF = of_bytes(lambda b, e4m3: b if e4m3 else (b & 0xFC).where(((b & 0x7F) > 0x7C) & (b != 0x7F), b))


def through_fp16(t: Any) -> Any:
    if not isinstance(t, torch.Tensor) or t.dtype != torch.bfloat16:
        return t
    return torch.empty_like(t).copy_(t.where(~t.isfinite(), t.clamp(-65504, 65504)).half())


def with_six_bits(t: Any) -> Any:
    if not isinstance(t, torch.Tensor) or t.dtype != torch.bfloat16:
        return t
    out = t.clone()
    out.view(torch.int16).bitwise_and_(-4)
    return out


def found(op, damaged, part):
    """The cases whose name has a part, and in which the judge finds the damage."""
    return list(finding(op, damaged, lambda case: part in case.name))


def of_operands(op, damage):
    reference = dispatch.reference(op)
    return lambda *args, **kwargs: reference(*map(damage, args), **kwargs)


DAMAGES = {"subnormal is 0": SUBNORMAL_IS_0, "NaN is a number": NEGATIVE_NAN_IS_A_NUMBER, "NaN is Inf": NAN_IS_INF}
OF_CODES = [(op, of) for op in (*MX, *FP8) for of in DAMAGES if op in MX or of != "NaN is Inf"]  # e4m3 has no Inf


@pytest.mark.parametrize(("op", "of"), OF_CODES)
def test_fp8_codes_that_a_kernel_gets_wrong(op, of):
    damage = DAMAGES[of]
    wrong = found(op, of_operands(op, damage), "every byte of e")
    formats = ["e4m3fn"] * (damage is not NAN_IS_INF) + ["e5m2"] * (damage is not NEGATIVE_NAN_IS_A_NUMBER and op in MX)
    first, second = ("dy", "x") if op.endswith("wgrad") else ("a", "b")
    for name in formats:
        for operand in (first, second):
            assert any(f"{name} in {operand}" in case for case in wrong), (name, operand)


@pytest.mark.parametrize("damage", [through_fp16, with_six_bits])
@pytest.mark.parametrize("op", ["mx_grouped_gemm", *NVFP4])
def test_values_that_a_kernel_gets_wrong(op, damage):
    part = "bfloat16 by e2m1" if op in MX else "values from 2^-100"
    assert found(op, of_operands(op, damage), part)


@pytest.mark.parametrize("op", NVFP4)
def test_tensor_scales_that_a_kernel_gets_wrong(op):
    reference = dispatch.reference(op)

    def damaged(change):
        def fn(a, a_scale, Ta, b, b_scale, Tb, *rest, **kwargs):
            T = change(Ta * Tb)
            return reference(a, a_scale, T, b, b_scale, torch.ones_like(T), *rest, **kwargs)

        return fn

    assert found(op, damaged(lambda T: T.clamp(-3e38, 3e38)), "ensor scales")
    assert found(op, damaged(lambda T: T.where(T.abs() >= 2.0**-126, 0 * T)), "ensor scales")
    assert not found(op, damaged(lambda T: T), "ensor scales"), "the product alone is no damage"


@pytest.mark.parametrize("op", NVFP4)
def test_a_kernel_that_returns_zeros_early(op):
    reference = dispatch.reference(op)

    def damaged(*args, **kwargs):
        out = reference(*args, **kwargs)
        return out if args[0].shape[0 if op.endswith("wgrad") else 1] else torch.zeros_like(out)

    assert found(op, damaged, "ensor scale")


# --- damages to scales, groups and outputs --------------------------------------------------------------------------

GROUPED = [op for op in (*MX, *FP8, *NVFP4) if "grouped" in op]
E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
WGRAD = [op for op in GROUPED if op.endswith("wgrad")]


def of_scales(dtypes, changed):
    """The damage to the scales of both operands that have one of these dtypes."""

    def damage(op, args, kwargs):
        args = list(args)
        for i in (1, 4) if op in NVFP4 else (1, 3):
            if isinstance(args[i], torch.Tensor) and args[i].dtype in dtypes:
                args[i] = changed(args[i])
        return dispatch.reference(op)(*args, **kwargs)

    return damage


def bytes_of_scales(dtype, changed):
    return of_scales((dtype,), lambda t: changed(t.view(torch.uint8)).to(torch.uint8).view(dtype))


def last_from_the_one_before(t):
    if t.ndim < 2 or t.shape[-1] < 2:
        return t
    out = t.clone(memory_format=torch.preserve_format)
    out[..., -1] = t[..., -2]
    return out


def of_offs(changed):
    def damage(op, args, kwargs):
        offs, M = args[-1], args[0].shape[1 if op.startswith("fp8") and op in WGRAD else 0]
        return dispatch.reference(op)(*args[:-1], changed(offs, M), **kwargs)

    return damage


def of_output(changed):
    return lambda op, args, kwargs: changed(dispatch.reference(op)(*args, **kwargs))


def truncated(op, args, kwargs):
    """Sums are cut to bfloat16, not rounded."""
    out_dtype = kwargs.get("out_dtype", torch.bfloat16)
    if out_dtype != torch.bfloat16:
        return dispatch.reference(op)(*args, **kwargs)
    out = dispatch.reference(op)(*args, **{**kwargs, "out_dtype": torch.float32})
    return (out.view(torch.int32) & -0x10000).view(torch.float32).where(out.isfinite(), out).to(torch.bfloat16)


def first_number_for_all(op, args, kwargs):
    """Every group has the tensor scale of the first operand of group 0."""
    args = list(args)
    args[2] = args[2][:1].expand(args[2].shape) if args[2].numel() else args[2]
    return dispatch.reference(op)(*args, **kwargs)


def without_last_row(out):
    out[..., -1:, :] = 0
    return out


WRONG = {
    "a scale byte of 0 is 2^-126": (MX, bytes_of_scales(E8M0, lambda b: b.where(b != 0, 1))),
    "a scale byte of 254 is NaN": (MX, bytes_of_scales(E8M0, lambda b: b.where(b != 254, 255))),
    "a scale byte of 255 is 2^127": (MX, bytes_of_scales(E8M0, lambda b: b.where(b != 255, 254))),
    "a subnormal scale is 0": (NVFP4, bytes_of_scales(E4M3, lambda b: b.where((b & 0x7F) >= 8, b & 0x80))),
    "a scale of NaN is 448": (NVFP4, bytes_of_scales(E4M3, lambda b: b.where(b & 0x7F != 0x7F, b - 1))),
    "the last scale is the one before": ((*MX, *NVFP4), of_scales((E8M0, E4M3), last_from_the_one_before)),
    "tensor scales of group 0": ([op for op in NVFP4 if op in GROUPED], first_number_for_all),
    "sums are cut": ((*MX, *FP8, *NVFP4), truncated),
    "fp32 by way of bfloat16": ((*MX, *FP8, *NVFP4), of_output(lambda out: out.bfloat16().to(out.dtype))),
    "no last row": ((*MX, *FP8, *NVFP4), of_output(without_last_row)),
    "the last group has the rest": (
        GROUPED,
        of_offs(lambda offs, M: torch.cat([offs[:-1], torch.full_like(offs[-1:], M)])),
    ),
}
WRONG_CALLS = [(op, wrong) for wrong, (ops, _) in WRONG.items() for op in ops]


@pytest.mark.turns(3)
@pytest.mark.parametrize(("op", "wrong"), WRONG_CALLS)
def test_scales_groups_and_outputs_that_a_kernel_gets_wrong(op, wrong):
    damage = WRONG[wrong][1]
    assert next(finding(op, lambda *args, **kwargs: damage(op, args, kwargs)), None)
