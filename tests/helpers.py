"""Functions and values that several test files share."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import multiprocessing
import os
import re
import tempfile
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mxspec import cases, check
from mxspec.machine_code.covering import Launch, covering
from mxspec.nn import Float8BlockwiseLinear, MXLinear, Recipe
from mxspec.spec import Case

ROOT = Path(__file__).parents[1]
DEVICE = check.default_device()
# `make complete` runs every generated case of the references, and compiles more options and outputs. `make test` takes
# enough of them to show each value, each kernel and each tile once. CONTRIBUTING.md has the list.
COMPLETE = os.environ.get("MXSPEC_TESTS") == "complete"
# The dtypes of the outputs to which every tile of a matmul is compiled. fp32 takes the most registers. For the
# large tiles of token groups bfloat16 does, and they have a test of their own.
COMPILED_OUTPUTS = (torch.float32, torch.bfloat16) if COMPLETE else (torch.float32,)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
only_interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
runs_kernels = pytest.mark.skipif(not INTERPRETED and DEVICE.type == "cpu", reason="needs a GPU or TRITON_INTERPRET=1")
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


def enough(shown: Sequence[Iterable[tuple[str, Hashable]]]) -> set[int]:
    """Indices of sets that together have everything that any of the sets has."""
    return covering([[Launch("", frozenset(traits), frozenset())] for traits in shown], 1)


def finding(op: str, damaged: Callable[..., Any], taken: Callable[[Case], bool] = lambda case: True) -> Iterator[str]:
    """The names of the hand-written cases in which the judge finds a damaged function, on the CPU, one by one."""
    cpu = torch.device("cpu")
    told = [c for c in cases.of(op).cases() if not c.raises and "large" not in c.flags and taken(c)]
    assert told
    return (c.name for c in told if check.check_case(op, c, damaged, cpu, name="damaged").status == "failed")


@functools.cache
def generated(op: str) -> tuple[Case, ...]:
    """Generated cases of an op that show every value of every dimension of its calls, and every call to be refused.

    `make complete` takes all generated cases: there, every two values meet.
    """
    space = cases.of(op).SPACE
    names = {case.name for case in space.cases()}
    if not COMPLETE:
        taken = enough([choice.items() for choice in space.choices])
        names = {case.name for i, case in enumerate(space.cases()) if i in taken}
    return tuple(check.cases_of(op, lambda case: "generated" in case.flags and (case.raises or case.name in names)))


def combined(*dimensions: Iterable[Any]) -> list[tuple[Any, ...]]:
    """One value of each dimension, in all combinations.

    `make test` takes half of them. If three dimensions or more have several values, every two values of two dimensions
    still meet.
    """
    numbered = itertools.product(*map(enumerate, dimensions))
    return [tuple(v for _, v in some) for some in numbered if COMPLETE or not sum(i for i, _ in some) % 2]


def one_in(count: int, of: Sequence[Any]) -> Sequence[Any]:
    """One in `count` of a list of combinations. `make complete` takes all."""
    return of if COMPLETE else of[::count]


def ends(*offs: int) -> Tensor:
    """The `offs` of token groups: the end of each group."""
    return torch.tensor(offs, dtype=torch.int32)


def full(value: int, *shape: int) -> Tensor:
    """Scale bytes, all of one value."""
    return torch.full(shape, value, dtype=torch.uint8)


def u8(t: Tensor) -> Tensor:
    """The bytes of codes or scales."""
    return t.view(torch.uint8).contiguous()


def published(name: str) -> dict[str, np.ndarray]:
    """Bytes that peers returned, from `tests/vectors`."""
    return dict(np.load(ROOT / "tests" / "vectors" / f"{name}.npz"))


def module_of(path: Path) -> ModuleType:
    """Import a file that lies outside of every package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain_environment(**more: str) -> dict[str, str]:
    """The environment for another process: it finds this checkout, interprets no kernels and chooses no backend."""
    clean = {k: v for k, v in os.environ.items() if not k.endswith("_INTERPRET") and k != "MXSPEC_BACKEND"}
    return {**clean, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), clean.get("PYTHONPATH")])), **more}


def blocks_of_stages(tile: dict[str, Any]) -> int:
    """The blocks of K that the stages of a tile of Hopper's FP8 matmul hold together."""
    return tile["NUM_STAGES"] * tile.get("OF_STAGE", 1)


def fetches_its_descriptors(ptx: str) -> bool:
    """Whether a kernel fetches exactly the parameters that are TMA descriptors. It names them by their numbers."""
    descriptors = re.findall(r"\.param \.align 64 \.b8 (\w+)\[128\]", ptx)
    return bool(descriptors) and re.findall(r"prefetch\.param\.tensormap \[(\w+)\]", ptx) == descriptors


def adds_once(reference: Callable[..., None], made: tuple[Any, ...], add: Callable[..., None]) -> None:
    """Assert that a kernel adds the same as its reference, gives the same bits again, and changes no other memory."""
    spec = reference.spec
    expected, got, again = (spec.own(made) for _ in range(3))
    reference(*expected)
    add(*got)
    assert check.difference(got[:1], expected[:1], spec.min_sqnr_db) is None
    add(*again)
    assert again[0].equal(got[0])
    assert check.strayed(got[0], made[0]) is None


SIZES = {MXLinear: (96, 160), Float8BlockwiseLinear: (256, 384)}


def layer(kind: type[nn.Linear], recipe: Recipe | str | None = None, **options: Any) -> nn.Linear:
    """An MXLinear or a Float8BlockwiseLinear with the sizes in `SIZES`."""
    torch.manual_seed(0)
    module = kind(*SIZES[kind], device=DEVICE, **options, **({"recipe": recipe} if recipe else {}))
    nn.init.normal_(module.weight, std=0.1)  # floor and rceil differ on these blocks, unlike on initial weights
    return module


def tokens(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(*shape, device=DEVICE, dtype=dtype, requires_grad=True)


def gradient(out: Tensor) -> Tensor:
    """A gradient for the output, with values of many magnitudes."""
    torch.manual_seed(2)
    return (torch.randn(out.shape, device=DEVICE) * torch.linspace(0.01, 3, out.shape[-1], device=DEVICE)).to(out.dtype)


def dot_scaled(
    self: Any, a: Any, a_scale: Any, a_format: str, b: Any, b_scale: Any, b_format: str, acc: Any, *_: Any
) -> Any:
    """A substitute for `TritonSemantic.dot_scaled`, which the interpreter lacks: exact products, summed in float64.

    The order of a sum does not depend on the tile, so different tiles give the same bits.
    """
    from triton.runtime.interpreter import TensorHandle

    def values(codes: np.ndarray, scale: np.ndarray, fmt: str) -> Tensor:
        dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[fmt]
        wide = torch.from_numpy(np.ascontiguousarray(codes)).view(dtype).double()
        factor = torch.from_numpy(np.ascontiguousarray(scale)).view(torch.float8_e8m0fnu).double()
        return wide * factor.repeat_interleave(32, 1)

    left = values(a.handle.data, a_scale.handle.data, a_format)
    right = values(b.handle.data.T, b_scale.handle.data, b_format)
    sums = torch.zeros(len(left), len(right), dtype=torch.float64)
    for k in range(left.shape[1]):
        sums.addcmul_(left[:, k, None], right[None, :, k])
    total = (acc.handle.data + sums.numpy()).astype(np.float32)
    return self.tensor(TensorHandle(total, acc.handle.dtype), acc.type)


def step(module: nn.Module, x: Tensor) -> list[Tensor]:
    """The output and all gradients of one step."""
    x.grad = None
    module.zero_grad()
    out = module(x)
    out.backward(gradient(out))
    return [out.detach(), x.grad, *(p.grad for p in module.parameters())]


def error_on_every_rank(call: Callable[[], object]) -> str:
    """The type and text of the error, which is the same on every rank."""
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as error:
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, f"{type(error).__name__}: {error}")
        assert len(set(every)) == 1, every
        return str(every[0])
    raise AssertionError("no error")


def on_ranks(world: int, worker: Callable[..., None], *args: Any, timeout_s: float = 60, backend: str = "gloo") -> None:
    """Run `worker(rank, *args)` in `world` processes. Raises if one of them raises.

    They communicate through gloo on CPUs, or through nccl with a GPU for each process.
    """
    if backend == "nccl" and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs; this machine has {torch.cuda.device_count()}")
    multiprocessing.set_forkserver_preload(["torch.distributed.checkpoint", "torch.distributed.fsdp", "mxspec.nn"])
    start_method = "spawn" if backend == "nccl" else "forkserver"  # CUDA needs a process of its own
    with tempfile.TemporaryDirectory() as folder:
        given = world, f"file://{folder}/store", timeout_s, backend, worker, args
        torch.multiprocessing.start_processes(_on_rank, given, nprocs=world, start_method=start_method)


def here() -> torch.device:
    """This rank's GPU under nccl. Otherwise the CPU, also outside of `on_ranks`."""
    on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _on_rank(
    rank: int, world: int, store: str, timeout_s: float, backend: str, worker: Callable[..., None], args: tuple
) -> None:
    torch.set_num_threads(1)
    limit, device = timedelta(seconds=timeout_s), None
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world, timeout=limit, device_id=device)
    worker(rank, *args)
    dist.destroy_process_group()
