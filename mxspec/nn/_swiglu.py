"""SwiGLU experts as one differentiable function, for a format that quantizes SwiGLU and its gradient itself.

| step | forward | backward |
|---|---|---|
| 1 | codes of x, both ways | codes of grad_out, both ways |
| 2 | `gate_up = x @ w_gate_up^T` | `grad_hidden = grad_out @ w_down`; the gradient of w_down |
| 3 | codes of `silu(gate) * up`, both ways | codes of the gradient of gate_up, both ways |
| 4 | `out = hidden @ w_down^T` | `grad_x = grad_gate_up @ w_gate_up`; the gradient of w_gate_up |

The forward saves gate_up in bfloat16, and the codes along the tokens that the gradients of the weights need. For dgrad
it saves the codes of the weights' transposes, or the weights themselves.

With a bias of gate_up, `(E, 2I)`, the activation is gpt-oss's clamped SwiGLU. Its op adds the bias, so gate_up is read
once. The bias's gradient is the sum of the gradient's codes along the tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import mxspec
from mxspec.nn._autograd import first_derivative_only, keep, kept, signature_once
from mxspec.nn._format import Format, Operand, Tokens, Weight


def swiglu_experts(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, offs: Tensor, tokens: Tokens, weights: tuple[Weight, Weight],
    by: Format, bias: Tensor | None = None, transposed: bool = False,
) -> Tensor:  # fmt: skip
    """The experts' output for tokens x. The caller has checked all arguments, and has quantized x and the weights.

    bias: of gate_up, for the clamped SwiGLU. transposed: whether the weights are `(E, K, N)`.
    """
    out, *_ = _SwigluExperts.apply(x, w_gate_up, w_down, bias, offs, tokens, *weights, by, transposed)
    return out


@signature_once
class _SwigluExperts(torch.autograd.Function):
    """The first output is the experts' output. The other outputs are for the backward only, and have no gradient."""

    @staticmethod
    def forward(
        x: Tensor, w_gate_up: Tensor, w_down: Tensor, bias: Tensor | None, offs: Tensor, tokens: Tokens,
        of_gate_up: Weight, of_down: Weight, by: Format, transposed: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert tokens.rows is not None
        gate_up = by.gemm(tokens.rows, of_gate_up.codes, of_gate_up.scale, offs, x.shape[0], x.dtype)
        rows, columns, _ = by.swiglu(gate_up, offs) if bias is None else by.clamped_swiglu(gate_up, bias, offs)
        assert rows is not None
        assert columns is not None
        out = by.gemm(rows, of_down.codes, of_down.scale, offs, x.shape[0], x.dtype)
        return out, gate_up, *(tensor for tensor in columns[:2] if tensor is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, w_gate_up, w_down, bias, offs, tokens, of_gate_up, of_down, by, transposed = inputs
        _, gate_up, codes, *scales = output
        scale = scales[0] if scales else None
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        dgrad, wgrad, wgrad_down, bgrad = ctx.needs_input_grad[:4]
        x_codes, x_scale, *_ = tokens.columns or (None, None)
        inner = dgrad or wgrad or bgrad  # the gradient of gate_up is needed
        (up_t, up_scale_t), (down_t, down_scale_t) = of_gate_up.for_dgrad(w_gate_up), of_down.for_dgrad(w_down)
        ctx.watch = None
        if by.watch is not None:
            of_first = by.watch.product(by, x, w_gate_up, offs, tokens, dgrad, transposed)
            hidden = lambda: _swiglu(gate_up) if bias is None else _clamped(gate_up, bias, offs)  # noqa: E731
            ctx.watch = of_first, by.watch.second(by, hidden, w_down, offs, inner, wgrad_down, transposed)
        keep(
            ctx,
            x,
            (w_gate_up, w_down),
            by.name,
            by,
            offs,
            gate_up if inner else None,
            codes if wgrad_down else None,
            scale if wgrad_down else None,
            x_codes if wgrad else None,
            x_scale if wgrad else None,
            down_t if inner else None,
            down_scale_t if inner else None,
            up_t if dgrad else None,
            up_scale_t if dgrad else None,
            bias if inner else None,
        )
        ctx.by, ctx.dtypes, ctx.transposed = by, (x.dtype, w_gate_up.dtype, w_down.dtype), transposed
        ctx.saves_weights = of_down.codes_t is None

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_out, by, (x_dtype, dtype, dtype_down) = gradients[0], ctx.by, ctx.dtypes
        offs, gate_up, codes, scale, x_codes, x_scale, down_t, down_scale_t, up_t, up_scale_t, bias = kept(ctx)
        dgrad, wgrad, wgrad_down, bgrad = ctx.needs_input_grad[:4]
        if grad_out is None:
            return (None,) * 10
        inner = dgrad or wgrad or bgrad
        grad_x = grad_w = grad_w_down = grad_bias = grad_hidden = random_inner = None
        rows, columns, random = by.gradients(grad_out, offs, inner, wgrad_down)
        if inner:
            if ctx.saves_weights:
                down_t, down_scale_t = by.saved_weight(down_t, ctx.transposed, rows.codes)
            grad_hidden = by.gemm(rows, down_t, down_scale_t, offs, grad_out.shape[0], x_dtype)
            down_t = down_scale_t = None  # free the memory
        if wgrad_down:
            grad_w_down = _wgrad(ctx, columns, Operand(codes, scale), offs, dtype_down)
        rows = columns = None  # free the memory
        if inner and bias is None:
            rows, columns, random_inner = by.swiglu_backward(gate_up, grad_hidden, offs)
        elif inner:
            rows, columns, _ = by.clamped_swiglu_backward(gate_up, bias, grad_hidden, offs)
        if ctx.watch is not None:
            first, second = ctx.watch
            second.gradient(lambda: grad_out, offs, inner, wgrad_down, random)
            if bias is None:
                first.gradient(lambda: _swiglu_backward(gate_up, grad_hidden), offs, dgrad, wgrad, random_inner)
            else:
                first.gradient(lambda: _clamped_backward(gate_up, bias, grad_hidden, offs), offs, dgrad, wgrad)
        grad_hidden = None
        if dgrad:
            if ctx.saves_weights:
                up_t, up_scale_t = by.saved_weight(up_t, ctx.transposed, rows.codes)
            grad_x = by.gemm(rows, up_t, up_scale_t, offs, grad_out.shape[0], x_dtype)
        rows = up_t = up_scale_t = None
        if wgrad:
            grad_w = _wgrad(ctx, columns, Operand(x_codes, x_scale), offs, dtype)
        if bgrad:
            grad_bias = by.sums(columns, offs, bias.dtype)
        return grad_x, grad_w, grad_w_down, grad_bias, None, None, None, None, None, None


def _wgrad(ctx: Any, of_gradient: Operand, of_tokens: Operand, offs: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of a weight. That of a transposed weight is computed transposed."""
    if ctx.transposed:
        of_tokens = of_tokens._replace(end=of_gradient.end)
        return ctx.by.wgrad(of_tokens, of_gradient, offs, dtype)
    return ctx.by.wgrad(of_gradient, of_tokens, offs, dtype)


@signature_once
class Swiglu(torch.autograd.Function):
    """`silu(gate) * up` of `(M, 2I)`: in bfloat16 by mxspec's ops, in float32 by PyTorch's."""

    @staticmethod
    def forward(gate_up: Tensor, name: str) -> Tensor:
        return _swiglu(gate_up)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        gate_up, name = inputs
        keep(ctx, gate_up, (), name, None, gate_up)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad_hidden,), (gate_up,) = gradients, kept(ctx)
        return _swiglu_backward(gate_up, grad_hidden), None


# The ops run with the backend "auto", whatever the user chose: all backends write the same bytes.


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    if gate_up.dtype == torch.bfloat16:
        return mxspec.swiglu(gate, up, backend="auto")
    return torch.nn.functional.silu(gate) * up


def _swiglu_backward(gate_up: Any, grad_hidden: Any) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    if gate_up.dtype == torch.bfloat16:
        return mxspec.swiglu_backward(gate, up, grad_hidden, backend="auto")
    d_up, d_silu = grad_hidden * torch.nn.functional.silu(gate), grad_hidden * up
    return torch.cat([torch.ops.aten.silu_backward(d_silu, gate), d_up], -1)


def _clamped(gate_up: Tensor, bias: Tensor, offs: Tensor) -> Tensor:
    """The clamped SwiGLU of gpt-oss, for a watch. Other than its op, it rounds only the result to bfloat16."""
    rows = torch.arange(len(gate_up), device=gate_up.device, dtype=torch.int32)
    group = torch.searchsorted(offs, rows, right=True)
    total = gate_up.float() + torch.nn.functional.pad(bias.float(), (0, 0, 0, 1))[group]
    gate, up = total[:, ::2].clamp(max=7.0), total[:, 1::2].clamp(-7.0, 7.0)
    return ((up + 1) * (gate * torch.sigmoid(gate * 1.702))).to(gate_up.dtype)


def _clamped_backward(gate_up: Tensor, bias: Tensor, grad_hidden: Any, offs: Tensor) -> Tensor:
    with torch.enable_grad():
        x = gate_up.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(_clamped(x, bias.detach(), offs), x, grad_hidden)
    return gradient
