"""The judge finds matmuls that are wrong for rare codes, values and tensor scales. Each is a damaged reference."""

from typing import Any

import pytest
import torch

from mxspec import cases, check, dispatch

CPU = torch.device("cpu")
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


def found(op, damaged, part=""):
    """The hand-written cases of which the judge finds the damage."""
    told = [
        case for case in cases.of(op).cases() if not case.raises and part in case.name and "large" not in case.flags
    ]
    assert told
    return [case.name for case in told if check.check_case(op, case, damaged, CPU, name="damaged").status == "failed"]


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
