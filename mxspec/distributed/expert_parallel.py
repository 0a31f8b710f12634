"""`ExpertParallel`: the experts of a `GroupedExperts` lie on several ranks, and each token travels to its experts."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from mxspec.distributed._agreement import CAUGHT, raise_everywhere
from mxspec.distributed._exchange import Plan, plan_of
from mxspec.distributed._wire import check_wire, wires
from mxspec.nn import GroupedExperts
from mxspec.nn._autograd import backend_now
from mxspec.nn.grouped_mm import check_offs

GRADIENTS = ("mean", "sum")
WIRES = ("values", "codes")


class ExpertParallel(ParallelStyle):
    """Shard a `GroupedExperts` by experts over the ranks of a mesh of one dimension, for `parallelize_module`.

    With E experts on R ranks, rank d holds the experts `d * E / R` to `(d + 1) * E / R - 1`: each parameter becomes a
    DTensor, `Shard(0)`. The layer's call stays as it was. Each rank calls it with its own tokens, sorted by all E
    experts, and gets the results of its own tokens. In between, the tokens travel to the ranks of their experts, and
    the results come back. By default they travel as they are, unquantized.

    The order of the rows of an expert is (source rank, position), as in `dispatch_reference`. So the output, the
    gradient of the tokens and the gradients of the weights are the bits of one process that runs the same layer on the
    concatenated batch, on a backend whose row does not depend on the other rows.

    A forward exchanges counts and tokens, and waits for the device once, to learn the numbers of rows. Every rank must
    run the same layers in the same order, with or without tokens. It must also run each backward.

    Args:
        wire: what travels. `values` sends the tokens, the results and both gradients in their own dtype. `codes` sends
            the codes of the layer's recipe for the tokens, and for the gradient of the results: about half the bytes of
            bfloat16. The results, and the gradient of the tokens, are summed afterwards, so they stay values. The layer
            then computes what one process computes with `wire_reference`. With mxfp8 and fp8_128_pow2, output and
            gradient of the tokens are those of `values`, and the gradients of the weights differ slightly. With
            fp8_128, whose scales are no powers of two, the gradients of the weights lose 3 dB.
        gradients: `mean` divides the gradients of the weights by R. They then fit a model whose other parameters
            average their gradients over the ranks, as DDP and FSDP2 do. FSDP2 over the experts divides by the size of
            its own mesh, so that the divisor is the number of all ranks. `sum` leaves the sum over the ranks: the
            gradient of the sum of their losses.

    Shapes:
        x: `(M_r, dim)`, this rank's tokens, bfloat16 or float32. M_r may differ from rank to rank, and may be 0.
        offs: `(E,)` int32, the exclusive end of each expert's tokens among this rank's tokens.
        Returns `(M_r, dim)` in x's dtype. Rows from `offs[-1]` on are 0.

    Raises, the same error on every rank of the mesh:
        TypeError: the module is not a `GroupedExperts`, or an argument of a forward has another dtype.
        ValueError: the mesh does not have one dimension; E is not a multiple of R; the ranks' layers, recipes or tokens
            differ in dtype, widths or in what requires a gradient; a shape or offs does not fit.
        RuntimeError: the layer is sharded already, or `cache_weights` holds its codes.

    A rank that dies or does not call raises no error of its own. The other ranks raise a RuntimeError when the
    connection closes, at the latest after the timeout of the process group (`init_process_group(timeout=)`).

    With the exchanges left out of the graph, `torch.compile` compiles the experts between them. `cache_weights` does
    not take a sharded layer. `reset_parameters` draws other values than in one process.

    Example, on each rank::

        mesh = init_device_mesh("cuda", (world_size,))
        parallelize_module(model, mesh, {"layers.*.experts": ExpertParallel()})

    Source: torchtitan's `ExpertParallel` of 2025 (the split of the experts, the exchange); Shazeer et al., 2017.
    """

    def __init__(self, *, wire: str = "values", gradients: str = "mean") -> None:
        for what, value, known in (("wire", wire, WIRES), ("gradients", gradients, GRADIENTS)):
            if value not in known:
                raise ValueError(f"ExpertParallel: unknown {what} {value!r}; needs one of {', '.join(known)}")
        self.wire, self.gradients = wire, gradients

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if device_mesh.ndim != 1:  # the mesh is the same on every rank
            raise ValueError(
                f"ExpertParallel: the mesh has {device_mesh.ndim} dimensions; needs 1. Take one: mesh['name']"
            )
        group, error, facts = device_mesh.get_group(), None, dict.fromkeys(_FACTS, "nothing")
        try:
            _check(module, device_mesh.size())
            assert isinstance(module, GroupedExperts)
            if self.wire == "codes":
                check_wire("ExpertParallel", module.recipe)
            facts = _facts(module, self)
        except CAUGHT as found:
            error = found
        raise_everywhere("ExpertParallel", error, facts, group)
        assert isinstance(module, GroupedExperts)
        for name in module.weight_names:
            whole = getattr(module, name)
            sharded = distribute_tensor(whole.detach(), device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
            setattr(module, name, nn.Parameter(sharded, whole.requires_grad))
        kind: Any = type(module)
        module.__class__ = _sharded(kind)
        assert isinstance(module, _Sharded)
        module.expert_mesh, module.wire = device_mesh, self.wire
        module.gradient_divisor = device_mesh.size() if self.gradients == "mean" else 1
        return module


class _Sharded(GroupedExperts):
    """The class of a sharded layer. Its weights are DTensors, and the matmuls read this rank's part of them."""

    expert_mesh: DeviceMesh
    gradient_divisor: int
    wire: str

    def _weights(self) -> tuple[Tensor, ...]:
        local = (getattr(self, name).to_local() for name in self.weight_names)
        return tuple(_divided(weight, self.gradient_divisor) for weight in local)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        rows, plan = self._dispatch(x, offs)
        return _combine(self.feed_forward(rows, plan.offs), plan)

    @torch.compiler.disable  # the numbers of rows are known only in the forward, and errors need a collective too
    def _dispatch(self, x: Tensor, offs: Tensor) -> tuple[Tensor, Plan]:
        name, group, error = type(self).__name__, self.expert_mesh.get_group(), None
        device, facts = self._weights()[0].device, {}
        try:
            if isinstance(x, DTensor) or isinstance(offs, DTensor):
                raise TypeError(f"{name}: x or offs is a DTensor; needs this rank's own tokens, as plain tensors")
            x = self.checked(x, self.dim, offs=offs)
            check_offs(name, offs, self.num_experts)
            if self.wire == "codes":
                check_wire(name, self.recipe)  # `set_recipe` may have come after
            grad = torch.is_grad_enabled()
            facts = {
                "the tokens' dtype": x.dtype,
                "requires_grad of the tokens": x.requires_grad and grad,
                "requires_grad of the weights": [weight.requires_grad and grad for weight in self._weights()],
                "the recipe": self.recipe,
            }
        except CAUGHT as found:
            error = found
        whole, ends = (x, offs) if error is None else (None, None)
        there, back = wires(self.recipe, backend_now(self)) if self.wire == "codes" else (None, None)
        plan = plan_of(name, whole, ends, error, facts, self.num_experts, group, device, there, back)
        return plan.dispatch(x), plan

    def reset_parameters(self) -> None:
        """Draw new weights. Each shard has its own random numbers; copies of a shard have the same."""
        for name in self.weight_names:
            weight = getattr(self, name)
            mesh, part = weight.device_mesh, 0
            for size, at, placement in zip(mesh.shape, mesh.get_coordinate(), weight.placements, strict=True):
                part = part if isinstance(placement, Replicate) else part * size + at
            local, bound = weight.detach().to_local(), weight.shape[-1] ** -0.5
            seed = int(torch.randint(2**62, ()))
            generator = torch.Generator(local.device).manual_seed(seed + part)
            nn.init.uniform_(local, -bound, bound, generator=generator)

    def extra_repr(self) -> str:
        mesh = self.expert_mesh
        return f"{super().extra_repr()}, wire={self.wire!r}, rank {mesh.get_local_rank()} of {mesh.size()}"


@torch.compiler.disable
def _combine(out: Tensor, plan: Plan) -> Tensor:
    return plan.combine(out)


@functools.cache
def _sharded(kind: Any) -> Any:
    # With the old class's name, for error texts and `print(model)`.
    return type(kind.__name__, (_Sharded, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def _check(module: nn.Module, ranks: int) -> None:
    name = type(module).__name__
    if not isinstance(module, GroupedExperts):
        raise TypeError(f"ExpertParallel: the module is a {name}; needs a GroupedExperts")
    weights = [getattr(module, weight) for weight in module.weight_names]
    if isinstance(module, _Sharded) or any(isinstance(weight, DTensor) for weight in weights):
        raise RuntimeError(
            f"ExpertParallel: {name} is sharded already. Parallelize a layer once, and before fully_shard."
        )
    if module._cached is not None:
        raise RuntimeError(f"ExpertParallel: cache_weights holds codes of {name}. Leave its with-block first.")
    if module.num_experts % ranks:
        raise ValueError(
            f"ExpertParallel: {name} has {module.num_experts} experts, which {ranks} ranks cannot share evenly; "
            f"needs a multiple of {ranks}"
        )


_FACTS = ("the layer", "the number of experts", "the widths", "the weights' dtype", "the options", "the recipe")


def _facts(module: GroupedExperts, style: ExpertParallel) -> dict[str, Any]:
    widths, dtypes = (module.dim, module.hidden_dim), [weight.dtype for weight in module._weights()]
    options = f"wire={style.wire!r}, gradients={style.gradients!r}"
    values = type(module).__name__, module.num_experts, widths, dtypes, options, module.recipe
    return dict(zip(_FACTS, values, strict=True))


def _divided(weight: Tensor, divisor: int) -> Tensor:
    return weight if divisor == 1 else _Divided.apply(weight, divisor)


class _Divided(torch.autograd.Function):
    """The weight itself. Its gradient is divided."""

    @staticmethod
    def forward(weight: Tensor, divisor: int) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.divisor = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0] / ctx.divisor, None
