"""The kernels of the FP8 grouped matmuls: an empty group, odd strides, and places past 2^31."""

from unittest import mock

import pytest
import torch

import mxspec
from mxspec import check, dispatch
from mxspec.cases.common.fp8_operands import codes, scales
from mxspec.cases.common.token_groups import far_apart
from mxspec.machine_code.fake_gpu import fake_gpu, unavailable
from tests.helpers import DEVICE, ends, runs_kernels

BACKENDS = [b for b in ("triton", "helion") if dispatch.has_kernel("fp8_grouped_gemm", b)]
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def run(backend, op, *args, **options):
    args = check.on_device(DEVICE, args)
    if reason := dispatch.refusal(op, backend, args, options):
        pytest.skip(reason)
    out = getattr(mxspec, op)(*args, backend=backend, **options)
    return (args[0] if out is None else out).cpu()


@runs_kernels
@each_backend
def test_the_matrix_of_a_group_without_tokens_stays_as_it_is(backend):
    acc = torch.full((2, 40, 128), -0.0)
    operands = codes(40, 128), scales(40, 1), codes(128, 128), scales(128, 1)
    assert run(backend, "fp8_grouped_gemm_wgrad_", acc, *operands, ends(0, 0)).signbit().all()


@runs_kernels
@each_backend
def test_tokens_and_experts_past_2_to_31(backend):
    """Rows of a are 2^24 elements apart, so row 128 begins past 2^31.

    Matrices of b are 2^30 apart, so the third does.
    """
    sizes, N, K = [70, 65, 40], 40, 128
    a = far_apart(sum(sizes), K, torch.float8_e4m3fn)
    b = torch.empty(2 * 2**30 + N * K, dtype=a.dtype).as_strided((3, N, K), (2**30, K, 1))
    b.copy_(codes(3 * N, K, seed=2).view(3, N, K))
    a_scale, b_scale, offs = scales(sum(sizes), 1), scales(3, 1)[..., None], ends(70, 135, 175)
    got = run(backend, "fp8_grouped_gemm", a, a_scale, b, b_scale, offs, out_dtype=torch.float32)
    expected = dispatch.reference("fp8_grouped_gemm")(a, a_scale, b, b_scale, offs, out_dtype=torch.float32)
    # Tensor cores keep only about 14 bits of a sum. A wrong address would cause an error as large as the values.
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def last_programs(count, *rest):
    """`range`, but only the end of a long one."""
    return range(count, *rest) if rest or count < 2**10 else range(count - 64, count)


@runs_kernels
@each_backend
@pytest.mark.parametrize("in_place", [False, True])
def test_features_past_2_to_31(backend, in_place):
    """dy has one block of 128 tokens and a few more than 2^24 features. The interpreter runs only the last programs."""
    N, R = 2**24 + 40, 128
    dy = torch.zeros(N, R, dtype=torch.uint8).view(torch.float8_e4m3fn)
    dy[-64:] = codes(64, R)
    x, dy_scale, x_scale = codes(1, R, seed=2), torch.full((1, 1), 0.5).expand(N, 1), torch.full((1, 1), 3.0)
    args = dy, dy_scale, x, x_scale, ends(R)
    op = "fp8_grouped_gemm_wgrad_" if in_place else "fp8_grouped_gemm_wgrad"
    with mock.patch("triton.runtime.interpreter.range", last_programs, create=True):  # a GPU runs all programs
        got = run(backend, op, *([torch.ones(1, N, 1)] if in_place else []), *args)
    expected = dispatch.reference("fp8_grouped_gemm_wgrad")(dy[-64:], dy_scale[-64:], *args[2:]) + int(in_place)
    # The same tolerance as above.
    torch.testing.assert_close(got[:, -64:], expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.turns(4)
@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
@each_backend
@pytest.mark.parametrize("target", ["sm90", "sm100"])
def test_what_is_compiled_for_tma_serves_no_strides_that_it_does_not_read(backend, target):
    def meta(*shape, dtype=torch.float32, odd=0):
        return torch.empty(*shape[:-1], shape[-1] + odd, dtype=dtype, device="meta")[..., : shape[-1]]

    E, N, K, M, e4m3 = 2, 264, 256, 384, torch.float8_e4m3fn
    offs, b_scale = meta(E, dtype=torch.int32), meta(E, 3, K // 128)
    features = meta(N, M, dtype=e4m3), meta(N, M // 128), meta(K, M, dtype=e4m3), meta(K, M // 128)
    kernel, in_place = (dispatch.kernel_module(op, backend) for op in ("fp8_grouped_gemm", "fp8_grouped_gemm_wgrad_"))
    with fake_gpu(target):
        for odd in (0, 3):
            a, b = meta(M, K, dtype=e4m3, odd=odd), meta(E, N, K, dtype=e4m3, odd=odd)
            for module, args in (
                (kernel, (a, meta(M, K // 128), b, b_scale, offs)),
                (in_place, (meta(E, N, K, odd=odd), *features, offs)),
            ):
                name = module.__name__.rpartition(".")[2]
                if not hasattr(module, "supports") or module.supports(*args) is None:
                    getattr(module, name)(*args)  # a descriptor refuses such strides
