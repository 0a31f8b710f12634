"""`ExpertParallel`: the experts of a layer lie on several ranks, and each token travels to its experts."""

from __future__ import annotations

import copyreg
import functools
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from mxspec.distributed._agreement import raise_everywhere
from mxspec.distributed._bare import Bare
from mxspec.distributed._exchange import Plan, plan_of
from mxspec.distributed._wire import check_wire, wires
from mxspec.nn import GroupedExperts
from mxspec.nn._autograd import backend_now
from mxspec.nn.expert_calls import ExpertCall, SeparableExperts
from mxspec.nn.experts import QuantizedExperts

GRADIENTS = ("mean", "sum")
WIRES = ("values", "codes")


class ExpertParallel(ParallelStyle):
    """Shard experts over the ranks of a mesh of one dimension, for `parallelize_module`.

    It takes a `GroupedExperts`, and experts of Hugging Face transformers that `mxspec.nn.convert` has converted. With E
    experts on R ranks, rank d holds the experts `d * E / R` to `(d + 1) * E / R - 1`: each parameter, also a bias,
    becomes a DTensor, `Shard(0)`. The layer's call stays as it was. Each rank calls it with its own tokens, and gets
    the results of its own tokens. In between, the tokens travel to the ranks of their experts, and the results come
    back. By default they travel as they are, unquantized. The router is no part of the layer, and stays whole.

    The order of the rows of an expert is (source rank, position), as in `dispatch_reference`. So the output, the
    gradient of the tokens and the gradients of the weights are the bits of one process that runs the same layer on the
    concatenated batch, on a backend whose row does not depend on the other rows. Experts of transformers also have
    gradients of the routing weights, with the same bits, and of biases. A matmul gives a bias's gradient, and its order
    of the sums may depend on the number of rows. `ExpertParallel` has been tested over gloo on a CPU, and over NCCL on
    2 H100 GPUs. It has not run on 4 GPUs, or on several hosts.

    A forward exchanges counts and tokens, and waits for the device once, to learn the numbers of rows. Every rank must
    run the same layers in the same order, with or without tokens. It must also run each backward.

    Args:
        wire: what travels. `values` sends the tokens, the results and both gradients in their own dtype. `codes` sends
            the codes of the layer's recipe for the tokens, and for the gradient of the results: about half the bytes of
            bfloat16. Experts of transformers quantize a token once, and copy its codes for each of its experts. The
            results, and the gradient of the tokens, are summed afterwards, so they stay values. The layer
            then computes what one process computes with `wire_reference`. With mxfp8 and fp8_128_pow2, output and
            gradient of the tokens are those of `values`, and the gradients of the weights differ slightly. With
            fp8_128, whose scales are no powers of two, the gradients of the weights lose 3 dB.
        gradients: `mean` divides the gradients of the weights by R. They then fit a model whose other parameters
            average their gradients over the ranks, as DDP and FSDP2 do. FSDP2 over the experts divides by the size of
            its own mesh, so that the divisor is the number of all ranks. `sum` leaves the sum over the ranks: the
            gradient of the sum of their losses.

    Shapes:
        x: of a `GroupedExperts`: `(M_r, dim)`, this rank's tokens, bfloat16 or float32. M_r may differ from rank to
            rank, and may be 0.
        offs: `(E,)` int32, the exclusive end of each expert's tokens among this rank's tokens.
        Returns `(M_r, dim)` in x's dtype. Rows from `offs[-1]` on are 0.
        hidden_states: of experts of transformers: `(T_r, hidden_size)`, this rank's tokens. T_r may differ from rank to
            rank, and may be 0.
        top_k_index, top_k_weights: `(T_r, top_k)`, the experts of each token among all E, and the routing weights.
        Returns `(T_r, hidden_size)` in the dtype of hidden_states.

    Raises:
        TypeError: the module is no layer of experts, or experts of transformers that are not converted, or experts
            that their own library shards (torchtitan); it has parameters that belong to no single expert; or an
            argument of a forward has another dtype.
        ValueError: the mesh does not have one dimension; E is not a multiple of R; the ranks' layers, recipes or tokens
            differ in dtype, widths or in what requires a gradient; a shape or offs does not fit.
        RuntimeError: the layer is sharded already, `gather_codes` has changed its weights, or `cache_weights` holds its
            codes.

    Each of these errors is the same on every rank of the mesh.

    A rank that dies or does not call raises no error of its own. Over gloo, the other ranks raise a RuntimeError when
    the connection closes, at the latest after the timeout of the process group (`init_process_group(timeout=)`). Over
    NCCL, they wait. Its watchdog reports the timeout, and ends the processes some time later.

    With the exchanges left out of the graph, `torch.compile` compiles the experts between them. `cache_weights` does
    not take a sharded layer. `reset_parameters` draws other values than in one process.

    Example, on each rank::

        mesh = init_device_mesh("cuda", (world_size,))
        parallelize_module(model, mesh, {"layers.*.experts": ExpertParallel()})

        mxspec.nn.convert(model, "fp8_128")  # a model of transformers
        parallelize_module(model, mesh, {"model.layers.*.mlp.experts": ExpertParallel()})

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
            assert isinstance(module, SeparableExperts)
            if self.wire == "codes":
                check_wire("ExpertParallel", module.recipe)
            facts = _facts(module, self)
        except Exception as found:  # any error, because the other ranks would wait for this rank
            error = found
        raise_everywhere("ExpertParallel", error, facts, group)
        assert isinstance(module, SeparableExperts)
        for name in module.expert_parameters():
            whole = getattr(module, name)
            sharded = distribute_tensor(whole.detach(), device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
            setattr(module, name, nn.Parameter(sharded, whole.requires_grad))
        kind: Any = type(module)
        module.__class__ = _sharded(kind)
        assert isinstance(module, _Sharded)
        module.expert_mesh, module.wire = device_mesh, self.wire
        module.gradient_divisor = device_mesh.size() if self.gradients == "mean" else 1
        return module


class _Sharded(SeparableExperts):
    """The first base of a sharded layer's class. Its parameters are DTensors, and the matmuls read this rank's part."""

    expert_mesh: DeviceMesh
    gradient_divisor: int
    wire: str

    def local(self, name: str) -> Tensor:
        return _divided(getattr(self, name).to_local(), self.gradient_divisor)

    def compute(self, *args: Any, **kwargs: Any) -> Tensor:
        rows, offs, plan, call = self._dispatch(args, kwargs)
        return self.results(_combine(self.run_experts(rows, offs), plan), call)

    @torch.compiler.disable  # the numbers of rows are known only in the forward, and errors need a collective too
    def _dispatch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Plan, ExpertCall]:
        name, group, error = type(self).__name__, self.expert_mesh.get_group(), None
        device, facts, call, message = self._stored()[0].device, {}, None, None
        there, back = wires(self.recipe, backend_now(self)) if self.wire == "codes" else (None, None)
        try:
            if any(isinstance(value, DTensor) for value in (*args, *kwargs.values())):
                what = " or ".join(signature(self.checked_call).parameters)
                raise TypeError(f"{name}: {what} is a DTensor; needs this rank's own tokens, as plain tensors")
            checked = self.checked_call(*args, **kwargs)
            if self.wire == "codes":
                check_wire(name, self.recipe)  # `set_recipe` may have come after
            grad, parameters = torch.is_grad_enabled(), [getattr(self, each) for each in self.expert_parameters()]
            facts = {
                "the tokens' dtype": checked.x.dtype,
                "requires_grad of the tokens": checked.x.requires_grad and grad,
                "requires_grad of the weights": [parameter.requires_grad and grad for parameter in parameters],
                "the recipe": self.recipe,
            }
            # Before the plan, for which the host waits: the device quantizes in the meantime.
            message = None if there is None else there.encode(checked.x)
            call = checked
        except Exception as found:  # any error, because the other ranks would wait for this rank
            error = found
        plan = plan_of(name, call, error, facts, self.experts_of_all_ranks(), group, device, there, back)
        assert call is not None  # otherwise plan_of has raised
        return plan.dispatch(call.x, message), plan.offs, plan, call

    def extra_repr(self) -> str:
        mesh = self.expert_mesh
        return f"{super().extra_repr()}, wire={self.wire!r}, rank {mesh.get_local_rank()} of {mesh.size()}"


@torch.compiler.disable
def _combine(out: Tensor, plan: Plan) -> Tensor:
    return plan.combine(out)


@functools.cache
def _sharded(kind: Any) -> Any:
    # With the old class's name, for error texts and `print(model)`.
    own: dict[str, Any] = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__reduce__": _reduce}
    if issubclass(kind, GroupedExperts):
        own["reset_parameters"] = _reset_parameters
    return type(kind.__name__, (_Sharded, kind), own)


def _reduce(self: Any) -> tuple[Any, ...]:
    """For `copy.deepcopy`: a copy is sharded too. `pickle` raises, because it does not find the class by its name."""
    return copyreg.__newobj__, (type(self),), self.__getstate__()  # type: ignore[attr-defined]


def _reset_parameters(self: Any) -> None:
    """Draw new weights. Each shard has its own random numbers.

    Copies of a shard have the same, if the generator of the CPU has the same seed on every rank.
    """
    for name in self.weight_names:
        weight = getattr(self, name)
        mesh, part = weight.device_mesh, 0
        for size, at, placement in zip(mesh.shape, mesh.get_coordinate(), weight.placements, strict=True):
            part = part if isinstance(placement, Replicate) else part * size + at
        local, bound = weight.detach().to_local(), weight.shape[-1] ** -0.5
        seed = int(torch.randint(2**62, ()))
        generator = torch.Generator(local.device).manual_seed(seed + part)
        nn.init.uniform_(local, -bound, bound, generator=generator)


def _check(module: nn.Module, ranks: int) -> None:
    name = type(module).__name__
    if isinstance(module, QuantizedExperts) and not isinstance(module, SeparableExperts):
        raise TypeError(
            f"ExpertParallel: the module is a {name} that its own library shards; use the expert parallelism of "
            "that library"
        )
    if not isinstance(module, SeparableExperts):
        raise TypeError(
            f"ExpertParallel: the module is a {name}; needs a GroupedExperts, or experts of transformers that are "
            "converted. Call mxspec.nn.convert(model, recipe) first."
        )
    parameters = dict(module.named_parameters())
    if isinstance(module, _Sharded) or any(isinstance(parameter, DTensor) for parameter in parameters.values()):
        raise RuntimeError(
            f"ExpertParallel: {name} is sharded already. Parallelize a layer once, and before fully_shard."
        )
    if any(isinstance(parameter.data, Bare) for parameter in parameters.values()):
        raise RuntimeError(
            f"ExpertParallel: gather_codes has changed the weights of {name}. Experts on several ranks cannot gather "
            "codes: leave them out of gather_codes."
        )
    if module._cached is not None:
        raise RuntimeError(f"ExpertParallel: cache_weights holds codes of {name}. Leave its with-block first.")
    if others := ", ".join(sorted(parameters.keys() ^ set(module.expert_parameters()))):
        raise TypeError(
            f"ExpertParallel: {name} has other parameters than those of single experts ({others}), such as a norm that "
            "all experts share or a parametrization; needs plain parameters whose first dimension is the expert"
        )
    if (experts := module.experts_of_all_ranks()) % ranks:
        raise ValueError(
            f"ExpertParallel: {name} has {experts} experts, which {ranks} ranks cannot share evenly; "
            f"needs a multiple of {ranks}"
        )


_FACTS = ("the layer", "the number of experts", "the widths", "the parameters' dtype", "the options", "the recipe")


def _facts(module: SeparableExperts, style: ExpertParallel) -> dict[str, Any]:
    parameters = [getattr(module, name) for name in module.expert_parameters()]
    widths, dtypes = [tuple(each.shape[1:]) for each in parameters], [each.dtype for each in parameters]
    options = f"wire={style.wire!r}, gradients={style.gradients!r}"
    values = type(module).__name__, module.experts_of_all_ranks(), widths, dtypes, options, module.recipe
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
