"""The MX matmuls of PyTorch, without a Blackwell GPU: the arguments they get, and why calls are refused."""

from functools import partial

import pytest
import torch
from torch.nn.functional import ScalingType, SwizzleType

from mxspec import check, dispatch
from mxspec.cases import mx_gemm as dense
from mxspec.cases import mx_grouped_gemm as grouped
from mxspec.cases import mx_grouped_gemm_wgrad as wgrad
from mxspec.cublas_kernels import _mx, mx_gemm, mx_grouped_gemm, mx_grouped_gemm_wgrad

BLOCKED, BF16 = {"scale_layout": "blocked"}, {"out_dtype": torch.bfloat16}


def scaled(mat_a, mat_b, offs=None, *, scale_a, scale_b, output_dtype, **recipe):
    """PyTorch's contract, as its sources state it, computed by the references.

    Places that it does not write are NaN.
    """
    blocks, tiles = ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4
    assert recipe == {
        "scale_recipe_a": blocks, "scale_recipe_b": blocks, "swizzle_a": tiles, "swizzle_b": tiles
    }  # fmt: skip
    assert mat_a.is_contiguous()
    assert mat_b.mT.is_contiguous()
    kw = {"out_dtype": output_dtype, "scale_layout": "blocked"}
    if offs is None:
        return DENSE(mat_a, scale_a, mat_b.mT, scale_b, **kw)
    assert output_dtype == torch.bfloat16
    if mat_b.ndim == 3:
        out = GROUPED(mat_a, scale_a, mat_b.mT, scale_b, offs, **kw)
        out[offs[-1] :] = torch.nan
    else:
        out = WGRAD(mat_a.mT, scale_a, mat_b, scale_b, offs, **kw)
        out[torch.diff(offs, prepend=offs.new_zeros(1)) == 0] = torch.nan
    return out


@pytest.fixture
def there(monkeypatch):
    """A Blackwell GPU, as far as `supports` can tell."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    _mx.absent.cache_clear()
    yield
    _mx.absent.cache_clear()


DENSE, GROUPED = dispatch.reference("mx_gemm"), dispatch.reference("mx_grouped_gemm")
WGRAD = dispatch.reference("mx_grouped_gemm_wgrad")
CALLS = [
    (mx_gemm, DENSE, partial(dense.made, 37, 48, 160, "blocked"), BLOCKED),
    (mx_gemm, DENSE, partial(dense.made, 1, 16, 32, "blocked"), {**BLOCKED, "out_dtype": torch.float32}),
    (mx_grouped_gemm, GROUPED, partial(grouped.made, [5, 0, 150], 20, 48, 96), {}),
    (mx_grouped_gemm, GROUPED, partial(grouped.made, [0, 0], 9, 16, 32), {}),
    (mx_grouped_gemm_wgrad, WGRAD, partial(wgrad.made, [32, 0, 96], 32, 40, 48), BF16),
]


@pytest.mark.parametrize(("module", "reference", "args", "options"), CALLS)
def test_what_is_given_is_what_the_op_means(module, reference, args, options, there, monkeypatch):
    for name in ("scaled_mm", "scaled_grouped_mm"):
        monkeypatch.setattr(torch.nn.functional, name, scaled)
    assert module.supports(*args(), **options) is None
    got = getattr(module, reference.__name__)(*args(), **options)
    assert check.difference((got,), (reference(*args(), **options),)) is None


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_torch_takes_what_it_is_given(out_dtype, there):
    """torch's own checks of shapes, strides and recipes, on tensors without data."""
    args = [t.to("meta") for t in dense.made(37, 48, 160, "blocked")]
    out = mx_gemm.mx_gemm(*args, out_dtype=out_dtype, **BLOCKED)
    assert (out.shape, out.stride(), out.dtype) == ((37, 48), (48, 1), out_dtype)


def test_torch_takes_the_groups_that_it_is_given(there):
    # torch 2.13 can trace `_scaled_grouped_mm`. It makes the same checks as the newer function that the backend calls.
    a, a_scale, b, b_scale, offs = (t.to("meta") for t in grouped.made([5, 0, 150], 20, 48, 96))
    assert torch._scaled_grouped_mm(a, b.mT, a_scale, b_scale, offs).shape == (175, 48)
    dy, dy_scale, x, x_scale, offs = (t.to("meta") for t in wgrad.made([32, 0, 96], 32, 40, 48))
    assert torch._scaled_grouped_mm(dy.mT, x, dy_scale, x_scale, offs).shape == (3, 40, 48)


def moved(t):
    """The same values one byte further."""
    flat = torch.zeros(t.numel() + 1, dtype=torch.uint8).view(t.dtype)[1:]
    return flat.view(t.shape)


def test_what_does_not_fit_is_refused_with_the_reason(there):
    a, a_scale, b, b_scale = dense.made(37, 48, 160, "blocked")
    e5m2 = torch.float8_e5m2
    plain = dense.made(37, 48, 160)
    wide = torch.zeros(37, 192, dtype=torch.uint8).view(a.dtype)[:, :160]
    for args, options, reason in [
        (plain, {}, "reads blocked scales, not plain ones"),
        ((a, a_scale, b.view(e5m2), b_scale), BLOCKED, "float8_e4m3fn only, and b is float8_e5m2"),
        ((wide, a_scale, b, b_scale), BLOCKED, "a without gaps between its rows, not with strides (192, 1)"),
        ((moved(a), a_scale, b, b_scale), BLOCKED, "a to begin at a multiple of 16 bytes"),
        ((a, a_scale, b, moved(b_scale)), BLOCKED, "b_scale to begin at a multiple of 16 bytes"),
        (dense.made(37, 40, 160, "blocked"), BLOCKED, "N in multiples of 16, not N = 40"),
        (dense.made(37, 48, 0, "blocked"), BLOCKED, "no empty matrices"),
    ]:
        assert reason in mx_gemm.supports(*args, **options)
    args = grouped.made([5, 10], 0, 48, 64)
    assert "grouped results as bfloat16 only, not as float32" in mx_grouped_gemm.supports(
        *args, out_dtype=torch.float32
    )
    assert "N in multiples of 16, not N = 40" in mx_grouped_gemm.supports(*grouped.made([5, 10], 0, 40, 64))
    assert "no empty matrices" in mx_grouped_gemm.supports(*grouped.made([], 9, 48, 64))
    assert "at most 1024 groups, not 1025" in mx_grouped_gemm.supports(*grouped.made(1025 * [0], 1, 16, 32))
    args = wgrad.made([32, 64], 0, 40, 48)
    assert "bfloat16 only, not as float32" in mx_grouped_gemm_wgrad.supports(*args)
    assert "K in multiples of 16, not K = 72" in mx_grouped_gemm_wgrad.supports(
        *wgrad.made([32, 64], 0, 40, 72), **BF16
    )
    assert "no empty matrices" in mx_grouped_gemm_wgrad.supports(*wgrad.made([], 32, 40, 48), **BF16)
    dy, dy_scale, x, x_scale, offs = wgrad.made([32, 64], 32, 40, 48, "plain")
    cut = dy[:96], dy_scale[:, :3], x[:96], x_scale[:, :3], offs
    assert "dy.mT without gaps between its rows" in mx_grouped_gemm_wgrad.supports(
        cut[0], args[1], cut[2], args[3], offs, **BF16
    )


def test_other_gpus_and_torches_are_refused(there, monkeypatch):
    args = dense.made(37, 48, 160, "blocked")
    monkeypatch.delattr(torch.nn.functional, "scaled_grouped_mm")
    reason = mx_grouped_gemm.supports(*grouped.made([5], 0, 48, 64))
    assert "needs torch.nn.functional.scaled_grouped_mm, which torch" in reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    _mx.absent.cache_clear()
    assert mx_gemm.supports(*args, **BLOCKED) == "has MX scales on compute capability 10.0 only, not 9.0"
    monkeypatch.setattr(torch.version, "cuda", None)
    _mx.absent.cache_clear()
    assert "needs a torch built with CUDA" in mx_gemm.supports(*args, **BLOCKED)


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run there")
def test_on_a_cpu_they_are_refused_by_name():
    with pytest.raises(ValueError, match="mx_gemm: backend 'cublas' runs on CUDA tensors only"):
        dispatch.public("mx_gemm")(*dense.made(37, 48, 160, "blocked"), **BLOCKED, backend="cublas")
