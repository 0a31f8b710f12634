"""If offs is out of order, the values have no meaning, but no access is outside of the operands and the result."""

import inspect
import math

import pytest
import torch

import mxspec
from mxspec import dispatch
from mxspec.cases.common.fp8_operands import codes, scales
from tests.helpers import DEVICE, INTERPRETED, ends

MARGIN = 2**16
OFFS = [  # falling, negative, past the last token, and the ends of int32
    (5, 3, 9), (4, 2, 20), (30, 10, 999), (-5, 3, 2), (-128, 256, 512), (2**31 - 1, 0, 20), (-(2**31), 2**31 - 1, -1),
    (0, 400, 380), (100, -(2**31), 20), (2**30, -(2**31), 20), (256, 128, 384), (384, 128, 256), (0, 0, 2**20),
]  # fmt: skip
OF_FOUR = (129, 258, 4, 320)  # the padded groups end past all scales
OPS = [op for op in dispatch.ops() if "offs" in inspect.signature(dispatch.reference(op)).parameters]
CHECKED = [op for op in OPS if "check_offs" in inspect.signature(dispatch.reference(op)).parameters]


def amid_nan(t):
    """The same values, contiguous on the device, with NaN before and after."""
    buffer = torch.full((t.numel() + 2 * MARGIN,), torch.nan).to(t.dtype).to(DEVICE)
    return buffer[MARGIN : MARGIN + t.numel()].view(t.shape).copy_(t)


def block_matmuls(op, offs):
    """The MX matmuls, and the NVFP4 matmuls of codes and of values."""
    E, N, K, M, tokens = len(offs), 40, 160, 20, 320
    block, dtype = (32, torch.float8_e8m0fnu) if op.startswith("mx") else (16, torch.float8_e4m3fn)
    tensor_scale = [] if op.startswith("mx") else [amid_nan(torch.ones(E))]

    def operand(*shape):
        if op.startswith("mx"):
            return amid_nan(codes(math.prod(shape[:-1]), shape[-1]).view(shape))
        return amid_nan(torch.full((*shape[:-1], shape[-1] // 2), 0x22, dtype=torch.uint8)).view(torch.float4_e2m1fn_x2)

    def scale(*shape):
        return amid_nan(torch.ones(shape).to(dtype))

    C = (tokens if op.endswith("wgrad") else K) // block
    cols = -(-C // 4) * 4
    for layout, options in ((layout, {"scale_layout": layout}) for layout in ("plain", "blocked")):
        if op.endswith("wgrad"):
            shapes = [(rows, C) if layout == "plain" else (-(-rows // 128) * 128, C + 4 * E) for rows in (N, K)]
            dy, x = ([operand(rows, tokens).mT, scale(*shape)] for rows, shape in zip((N, K), shapes, strict=True))
            yield (*dy, *tensor_scale, *x, *tensor_scale, offs), options, (E, N, K)
        else:
            a = [operand(M, K), scale(*(M, C) if layout == "plain" else (M + 128 * E, cols))]
            of_b = scale(*(E, N, C) if layout == "plain" else (E, 128 * cols))
            yield (*a, *tensor_scale, operand(E, N, K), of_b, *tensor_scale, offs), options, (M, N)
            if op == "mx_grouped_gemm":
                by_4 = amid_nan(torch.full((E, N, K // 2), 0x22, dtype=torch.uint8)).view(torch.float4_e2m1fn_x2)
                for of_a in (a, (amid_nan(torch.ones(M, K).bfloat16()), None)):
                    yield (*of_a, by_4, of_b, offs), options, (M, N)
    if tensor_scale:
        a, b = (amid_nan(torch.ones(shape).bfloat16()) for shape in ((M, K), (E, N, K)))
        dy, x = (amid_nan(torch.ones(shape).bfloat16()) for shape in ((tokens, N), (tokens, K)))
        first, second, shape = (dy, x, (E, N, K)) if op.endswith("wgrad") else (a, b, (M, N))
        yield (first, None, *tensor_scale, second, None, *tensor_scale, offs), {}, shape


def calls(op, offs):
    """Arguments, options, and the shapes of the first outputs."""
    E, N, K, R, M, D = 3, 40, 128, 256, 20, 160
    if op.startswith("fp8_grouped_gemm_wgrad"):
        features = [amid_nan(t) for t in (codes(N, R), scales(N, 2), codes(K, R), scales(K, 2))]
        acc = [amid_nan(torch.zeros(E, N, K))] if op.endswith("_") else []
        return [((*acc, *features, offs), {}, (E, N, K))]
    if op == "fp8_grouped_gemm":
        weights = [amid_nan(t) for t in (codes(E * N, K).view(E, N, K), scales(E, 1)[..., None])]
        tokens = [[amid_nan(t) for t in (codes(count, K), scales(count, 1))] for count in (M, 300)]
        return [((*of, *weights, offs), {}, (len(of[0]), N)) for of in tokens]
    if op.startswith(("mx_grouped_gemm", "nvfp4_grouped_gemm")):
        return list(block_matmuls(op, offs))
    x = amid_nan(torch.ones(M, D, dtype=torch.bfloat16))
    wide = amid_nan(torch.ones(M, 256, dtype=torch.bfloat16))
    scale = x.view(torch.uint8)
    ones = {dtype: amid_nan(torch.ones(M, D // 32).to(dtype)) for dtype in (torch.float32, torch.float8_e8m0fnu)}
    starts = [offs.flip(0), mxspec.pad_token_groups(x, offs, 8, backend="reference")[1]]
    columns = [{"axis": -2, "scale_layout": layout} for layout in ("plain", "blocked")]
    plain = {"scale_layout": "plain"}
    both_scales = [("plain", (512, D // 32)), ("blocked", (512 + 128 * E, 4 * -(-D // 128)))]
    return {
        "fp8_quantize_k_groups": [((x, offs), {}, (D, 512), (D, 4))],
        "fp8_quantize_rowcol_groups": [((wide, offs), {}, (M, 256), (M, 2), (256, 512), (256, 4))],
        "swiglu_fp8_quantize_rowcol_groups": [((wide, offs), {}, (M, 128), (M, 1), (128, 512), (128, 4))],
        "swiglu_backward_fp8_quantize_rowcol_groups": [
            ((wide, amid_nan(wide[:, :128]), offs), {}, (M, 256), (M, 2), (256, 512), (256, 4))
        ],
        "swiglu_mx_quantize_rowcol_groups": [((wide, offs), {}, (512, 128), (512 + 128 * E, 4), (512, 128))],
        "swiglu_backward_mx_quantize_rowcol_groups": [
            ((wide[:, : 2 * half], amid_nan(wide[:, :half]), offs), plain, (512, 2 * half), (512, half // 16))
            for half in (96, 128)
        ],
        "clamped_swiglu_fp8_quantize_rowcol_groups": [
            ((wide, amid_nan(wide[:E]), offs), {}, (M, 128), (M, 1), (128, 512), (128, 4))
        ],
        "clamped_swiglu_backward_fp8_quantize_rowcol_groups": [
            ((wide, amid_nan(wide[:E]), amid_nan(wide[:, :128]), offs), {}, (M, 256), (M, 2), (256, 512), (256, 4))
        ],
        "fp8_requantize_k_groups": [
            ((amid_nan(codes(M, D)), amid_nan(ones[torch.float32][:, :2]), offs), {}, (D, 512), (D, 4))
        ],
        "mx_requantize_groups": [
            ((amid_nan(codes(M, D)), ones[torch.float8_e8m0fnu], offs), {"scale_layout": layout}, (512, D))
            for layout in ("plain", "blocked")
        ],
        "mx_fake_quantize_rowcol_groups": [((x, offs), {}, (M, D), (M, D))],
        "nvfp4_fake_quantize_rowcol_groups": [
            ((x, offs), {"signs": signs}, (M, D), (E,), (80, D), (E,)) for signs in (None, 0xD7E8)
        ],
        "mx_quantize_groups": [((x, offs), options, (512, D)) for options in ({}, *columns)],
        "mx_quantize_rowcol_groups": [
            ((x, offs), {"scale_layout": layout}, (512, D), *scales, (512, D)) for layout, *scales in both_scales
        ],
        "nvfp4_quantize_groups": [
            ((x, offs, *amax), options, (512 // (2 if "axis" in options else 1), D // (1 if "axis" in options else 2)))
            for options in ({}, *columns)
            for amax in ((), (amid_nan(torch.ones(E)),))
        ],
        "pad_token_groups": [((x, offs, 8), {}, (48, D))],
        "place_token_groups": [((x, offs, start, 50), {}, (50, D)) for start in starts],
        "to_blocked_k_groups": [
            ((scale, offs), {}, (128, 2 * D + E * 4)),
            ((scale.mT, offs), {}, (384, M + E * 4)),
        ],
        "to_blocked_m_groups": [((scale, offs), {}, (M + E * 128, 2 * D))],
        "unpad_token_groups": [((x, offs, start, 30), {}, (30, D)) for start in starts],
        "zero_unused_": [((x, offs), {}, (M, D)), ((amid_nan(torch.ones(E, N, D)), offs), {}, (E, N, D))],
    }[op]


@pytest.fixture
def guarded(monkeypatch):
    """Each tensor that Python allocates lies between bytes that must not change."""
    buffers = []

    def guard(allocate):
        def allocated(*args, **options):
            out = allocate(*args, **options)
            if type(out) is not torch.Tensor or out.is_meta:  # a tensor that a compiler traces with
                return out
            buffers.append(torch.full((out.nbytes + 2 * MARGIN,), 0x5A, dtype=torch.uint8, device=out.device))
            return buffers[-1][MARGIN : MARGIN + out.nbytes].view(out.dtype).view(out.shape)

        return allocated

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", guard(torch.empty))
        patch.setattr(torch.Tensor, "new_empty", guard(torch.Tensor.new_empty))
        patch.setattr(torch, "zeros", guard(torch.zeros))
        yield buffers


@pytest.fixture
def accessed(monkeypatch):
    """The addresses of each masked access in Triton's interpreter: first byte and end. Elsewhere there are none."""
    seen = []
    if INTERPRETED:
        from triton.runtime.interpreter import InterpreterBuilder

        def watched(access, mask_at):
            def accessed(self, pointers, *args, **more):
                mask = args[mask_at].data.astype(bool)
                there = pointers.data[mask if mask.shape == pointers.data.shape else ...].reshape(-1)
                if there.size:
                    size = pointers.get_element_ty().primitive_bitwidth // 8
                    seen.append((int(there.min()), int(there.max()) + size))
                return access(self, pointers, *args, **more)

            return accessed

        for name, mask_at in (("create_masked_load", 0), ("create_masked_store", 1)):
            monkeypatch.setattr(InterpreterBuilder, name, watched(getattr(InterpreterBuilder, name), mask_at))
    return seen


def are_inside(accessed, tensors, buffers) -> bool:
    """Whether each access is inside of one of the tensors, or of the part of a buffer that the call asked for."""
    ranges = []
    for t in tensors:
        if isinstance(t, torch.Tensor) and t.numel():
            last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
            ranges.append((t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()))
    ranges += [(b.data_ptr() + MARGIN, b.data_ptr() + b.nbytes - MARGIN) for b in buffers]
    return all(any(low <= first and end <= high for low, high in ranges) for first, end in accessed)


@pytest.mark.turns(18)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("backend", ["reference", "triton", "helion"])
def test_nothing_else_is_read_or_written(backend, op, guarded, accessed):
    more = [OF_FOUR] if op.startswith(("mx_grouped_gemm", "nvfp4_grouped_gemm")) else []
    for offs in [*OFFS, *more]:
        for args, options, *shapes in calls(op, ends(*offs).to(DEVICE)):
            if reason := dispatch.refusal(op, backend, args, options):
                pytest.skip(reason)
            guarded.clear()
            accessed.clear()
            out = getattr(mxspec, op)(*args, backend=backend, **options)
            assert are_inside(accessed, args, guarded), offs
            outputs = args[:1] if out is None else out if isinstance(out, tuple) else (out,)
            assert [t.shape for t in outputs[: len(shapes)]] == shapes, offs
            # e2m1 has no NaN, but the scale of a block that has read a NaN is NaN.
            values = outputs[1] if outputs[0].dtype == torch.float4_e2m1fn_x2 else outputs[0]
            assert not (values.is_floating_point() and values.float().isnan().any()), offs
            assert guarded or out is None or backend == "reference"
            assert all((b[:MARGIN] == 0x5A).all() and (b[-MARGIN:] == 0x5A).all() for b in guarded), offs
            if out is None:
                around = args[0].new_empty(0).set_(args[0].untyped_storage())
                assert around[:MARGIN].isnan().all(), offs
                assert around[-MARGIN:].isnan().all(), offs


@pytest.mark.parametrize("op", CHECKED)
def test_it_is_refused_where_that_is_asked_for(op):
    for offs in OFFS:
        for args, options, *_ in calls(op, ends(*offs).to(DEVICE)):
            with pytest.raises(ValueError, match=rf"{op}: offs\["):
                getattr(mxspec, op)(*args, check_offs=True, **options)
