"""fp8_gemm in cuBLAS and DeepGEMM, without a GPU or either library: their arguments, and refused calls."""

import sys
from types import SimpleNamespace

import pytest
import torch

from mxspec import check, dispatch
from mxspec.cases.fp8_gemm import as_quantized, operands
from mxspec.cublas_kernels import fp8_gemm as cublas
from mxspec.deepgemm_kernels import _library
from mxspec.deepgemm_kernels import fp8_gemm as deepgemm
from mxspec.deepgemm_kernels import fp8_gemm_ as deepgemm_
from mxspec.reference.fp8_gemm import MIN_SQNR_DB, fp8_gemm

BY_ROW = operands(132, 272, 1024, 1, major="mn")


def fp8_gemm_nt(a, b, out, c=None, recipe=None):
    """DeepGEMM's contract on Hopper, as its sources state it, computed by the reference."""
    (a, a_scale), (b, b_scale) = a, b
    M, N = out.shape
    assert a_scale.stride() == (1, M + -M % 4)
    if recipe[1] == 1:
        assert c is out
        assert b_scale.stride() == (1, N + -N % 4)
        out += fp8_gemm(a, a_scale, b, b_scale, out_dtype=torch.float32)
    else:
        assert c is None
        assert b_scale.is_contiguous()
        out.copy_(fp8_gemm(a, a_scale, b, b_scale))


@pytest.fixture
def there(monkeypatch):
    """A Hopper GPU with both libraries, as far as `supports` can tell."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace(fp8_gemm_nt=fp8_gemm_nt))
    caches = (cublas._absent, _library.absent, _library.library)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize(("made", "out_dtype"), [(as_quantized(), torch.bfloat16), (BY_ROW, torch.float32)])
def test_what_the_quantizers_give_fits_as_it_is(made, out_dtype, there):
    assert cublas.supports(*made, out_dtype=out_dtype) is None
    assert deepgemm.supports(*made, out_dtype=out_dtype) is None
    with check.poisoned(0xFF):
        out = deepgemm.fp8_gemm(*made, out_dtype=out_dtype)
    assert check.difference((out,), (fp8_gemm(*made, out_dtype=out_dtype),), MIN_SQNR_DB) is None


def test_deepgemm_adds_in_place(there):
    acc = torch.full((132, 272), 2.0**18)
    expected = acc.double() + fp8_gemm(*BY_ROW, out_dtype=torch.float32)
    assert deepgemm_.supports(acc, *BY_ROW) is None
    assert deepgemm_.fp8_gemm_(acc, *BY_ROW) is None
    assert check.sqnr_db(acc, expected) > 140


def test_what_deepgemm_does_not_add_to_is_refused_with_the_reason(there):
    acc = torch.zeros(132, 280)
    a, a_scale, b, b_scale = BY_ROW
    assert deepgemm_.supports(acc[:, :272], *BY_ROW) == "needs acc with strides (272, 1), not (280, 1)"
    assert "adds in place with 1x128 by 1x128 only" in deepgemm_.supports(acc[:, :272], *as_quantized())
    assert "a_scale with strides" in deepgemm_.supports(acc[:, :272], a, a_scale.contiguous(), b, b_scale)
    unaligned = torch.zeros(132 * 272 + 1)[1:].view(132, 272)
    assert deepgemm_.supports(unaligned, *BY_ROW) == "needs acc to begin at a multiple of 16 bytes"


@pytest.mark.parametrize("K", [512, 1024])
@pytest.mark.parametrize("rows", [128, 1])
@pytest.mark.parametrize("M", [4, 132])
def test_torch_takes_what_cublas_is_given(M, rows, K, there):
    """torch's own checks of shapes and strides, on tensors without data."""
    # For 128x128 scales, torch 2.13 counts only whole blocks here. It counts the rest on a GPU.
    N = rows if rows > 1 else 16
    a, a_scale, b, b_scale = operands(M, N, K, rows, major="mn")
    b_scale = b_scale if rows == 1 else b_scale.contiguous()
    assert cublas.supports(a, a_scale, b, b_scale) is None
    out = cublas.fp8_gemm(*(t.to("meta") for t in (a, a_scale, b, b_scale)), out_dtype=torch.float32)
    assert (out.shape, out.stride(), out.dtype) == ((M, N), (N, 1), torch.float32)


def test_what_does_not_fit_is_refused_with_the_reason(there):
    a, a_scale, b, b_scale = as_quantized()
    long, long_scale, wide, wide_scale = operands(132, 272, 640, major="mn")
    odd = operands(6, 200, 512, major="mn")
    *some, some_scale = operands(132, 272, 2880, major="mn")
    tail, tail_by_row = (*some, some_scale.contiguous()), operands(132, 272, 2880, 1, major="mn")
    unaligned = torch.zeros(a.numel() + 1, dtype=torch.uint8).view(a.dtype)[1:].view(a.shape)
    for args, by_cublas, by_deepgemm in [
        ((a, a_scale.contiguous(), b, b_scale), "a_scale with strides (1, 132), not (8, 1)", "a_scale with strides"),
        ((a, a_scale, b, b_scale.t().contiguous().t()), "b_scale with strides (8, 1), not (1, 3)", "b_scale with"),
        ((unaligned, a_scale, b, b_scale), "a to begin at a multiple of 16 bytes", "a to begin at a multiple of 16"),
        ((a[:0], a_scale[:0], b, b_scale), "no empty matrices", "no empty matrices"),
        ((long, long_scale, wide, wide_scale.contiguous()), "K in multiples of 512, not K = 640", None),
        (tail, "K in multiples of 512, not K = 2880", None),
        (tail_by_row, "K in multiples of 128, not K = 2880", "does 1x128 by 1x128 to torch.float32"),
        (odd, "M in multiples of 4, not M = 6", "a_scale with strides (1, 8), not (1, 6)"),
        ((a, a_scale, b[:266], b_scale), "N in multiples of 16, not N = 266", "N in multiples of 8 for"),
        ((a[:1], a_scale[:1], b, b_scale), "M in multiples of 4, not M = 1", "the scales of a single row"),
        (BY_ROW, None, "does 1x128 by 1x128 to torch.float32, not to torch.bfloat16"),
    ]:
        for module, reason in ((cublas, by_cublas), (deepgemm, by_deepgemm)):
            said = module.supports(*args)
            assert said is None if reason is None else reason in (said or ""), (module.__name__, said)
    assert "does 1x128 by 128x128 to torch.bfloat16" in deepgemm.supports(*as_quantized(), out_dtype=torch.float32)


def test_what_is_not_there_has_a_reason(there, monkeypatch):
    monkeypatch.delattr(torch.nn.functional, "scaled_mm")
    assert "needs torch.nn.functional.scaled_mm, which torch" in cublas.supports(*as_quantized())
    monkeypatch.setattr(torch.version, "cuda", None)
    cublas._absent.cache_clear()
    assert "needs a torch built with CUDA" in cublas.supports(*as_quantized())
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    for cache in (_library.library, _library.absent):
        cache.cache_clear()
    assert "needs the package deep_gemm, which cannot be imported" in deepgemm.supports(*as_quantized())
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace())
    for cache in (_library.library, _library.absent):
        cache.cache_clear()
    assert deepgemm.supports(*as_quantized()) == "needs fp8_gemm_nt, which this build of deep_gemm lacks"


def test_other_gpus_are_refused(there, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert cublas.supports(*as_quantized()) == "has blocks of 128 on compute capability 9.0 only, not 10.0"
    assert deepgemm.supports(*as_quantized()) == "keeps fp32 scales on compute capability 9.0 only, not 10.0"


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run there")
@pytest.mark.parametrize("backend", ["cublas", "deepgemm"])
def test_on_a_cpu_they_are_refused_by_name(backend):
    with pytest.raises(ValueError, match=f"fp8_gemm: backend '{backend}' runs on CUDA tensors only"):
        dispatch.public("fp8_gemm")(*as_quantized(), backend=backend)
