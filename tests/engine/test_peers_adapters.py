"""The adapters of benchmarks/peers/, tested without the libraries: everything that the benchmarks rely on."""

import inspect
import sys
from types import ModuleType

import pytest
import torch

import mxspec
from mxspec import check, dispatch
from mxspec.bench.measure import load_peers
from mxspec.cases import mx_grouped_gemm as mx_groups

peers = load_peers()
E2M1 = torch.float4_e2m1fn_x2

ALWAYS_THERE = {"torch", "mxspec"}
EACH = [(op, label) for op, adapters in peers.ADAPTERS.items() for label in adapters]
MODULES = ("torchao", "deep_gemm", "fbgemm_gpu", "transformer_engine", "transformer_engine_torch")


@pytest.fixture
def no_libraries(monkeypatch):
    """Make all libraries impossible to import, on every machine."""
    for name in [m for m in sys.modules if m.partition(".")[0] in MODULES]:
        monkeypatch.delitem(sys.modules, name)
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(torch.version, "cuda", None)


@pytest.mark.parametrize(("op", "label"), EACH)
def test_an_adapter_has_the_signature_of_its_op(op, label):
    def parameters(fn):
        return [(p.name, p.kind, p.default) for p in inspect.signature(fn).parameters.values()]

    assert parameters(peers.ADAPTERS[op][label]) == parameters(dispatch.reference(op))


def test_ops_are_known_and_labels_begin_with_a_library():
    assert set(peers.ADAPTERS) <= set(dispatch.ops())
    assert {label.split(" ")[0] for _, label in EACH} == set(peers.LIBRARIES)


@pytest.mark.parametrize("library", sorted(peers.LIBRARIES.keys() - ALWAYS_THERE))
def test_an_absent_library_says_so(library, no_libraries):
    with pytest.raises(ImportError, match=r"\w+ \w+"):
        peers.LIBRARIES[library]()


def test_a_library_that_does_not_load_is_absent(tmp_path, monkeypatch):
    (tmp_path / "broken_library.py").write_text("raise OSError('libsomething.so.13: no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ImportError, match=r"broken_library is installed, but cannot be imported: OSError: libsomething"
    ):
        peers._common.version_of("broken_library")


@pytest.mark.parametrize(
    ("op", "label"), [each for each in EACH if each[1].split(" ")[0] not in {"cuBLAS", *ALWAYS_THERE}]
)
def test_an_adapter_imports_its_library_when_it_is_called(op, label, no_libraries):
    case = next(c for c in dispatch.reference(op).spec.cases() if not c.flags)
    with pytest.raises((ImportError, peers.Unsupported)):
        peers.ADAPTERS[op][label](*case.args(), **case.kwargs)


def test_groups_padded_in_torch_and_quantized_in_three_ops_are_the_same():
    x, offs = torch.randn(50, 64), torch.tensor([5, 5, 45], dtype=torch.int32)
    op, padded = "pad_token_groups", peers.ADAPTERS["pad_token_groups"]["torch index_copy_"](x, offs, 32)
    assert check.difference(padded, dispatch.reference(op)(x, offs, 32)) is None
    op, ops = "mx_quantize_groups", peers.ADAPTERS["mx_quantize_groups"]["mxspec in three ops"]
    for axis in (-1, -2):
        assert check.difference(ops(x, offs, axis=axis), dispatch.reference(op)(x, offs, axis=axis)) is None


def test_what_a_library_does_not_do_has_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_gemm", ModuleType("deep_gemm"))
    args = [torch.zeros(2, 2)] * 4
    with pytest.raises(peers.Unsupported, match="no fp8_gemm_nt"):
        peers.ADAPTERS["fp8_gemm"]["DeepGEMM"](*args)
    with pytest.raises(peers.Unsupported, match="Hopper"):
        peers.ADAPTERS["fp8_gemm"]["cuBLAS fp8"](*args)


# --- tuning -----------------------------------------------------------------------------------------------------


class Kernel:
    """A stand-in with the parts of Triton's Autotuner that `_tuned` uses."""

    def __init__(self):
        self.configs, self.compiled, self.raced = list("abcdef"), 0, []

    def run(self, *, grid, warmup):
        self.raced.append("".join(self.configs))
        self.configs_timings = {config: [-float(ord(config))] for config in self.configs}
        return "ran"

    def warmup(self, *, grid):
        self.compiled += len(self.configs)


def test_the_first_tuning_races_every_configuration_and_later_ones_the_best_four():
    pytest.importorskip("triton.runtime._async_compile")
    kernel = Kernel()
    for _ in range(3):
        assert peers.torchao._tuned(kernel, lambda: kernel.run(grid=(1,), warmup=False)) == "ran"
    assert (kernel.compiled, kernel.raced) == (6, ["abcdef", "fedc", "fedc"])


# --- fp8_gemm ---------------------------------------------------------------------------------------------------


def gemm_args(x, w):
    return *mxspec.fp8_quantize_1x128(x, backend="reference"), *mxspec.fp8_quantize_128x128(w, backend="reference")


@pytest.mark.parametrize("M", [1, 6, 64])
@pytest.mark.parametrize(
    ("label", "rows"),
    [("cuBLAS fp8", lambda M: M), ("DeepGEMM", lambda M: M + -M % 4), ("torchao", lambda M: M + -M % 4)],
)
def test_scales_are_prepared_mn_major(label, rows, M):
    a, a_scale, b, b_scale = gemm_args(torch.randn(M, 640), torch.randn(200, 640))
    _, prepared, _, prepared_b = peers.ADAPTERS["fp8_gemm"][label].prepare(a, a_scale, b, b_scale)
    assert (prepared.shape, prepared.stride()) == (a_scale.shape, (1, rows(M)))
    assert torch.equal(prepared, a_scale)
    assert torch.equal(prepared_b[:, :5], b_scale)
    assert prepared_b.stride() == ((8, 1) if label == "cuBLAS fp8" else (5, 1))  # K / 128 = 5, padded to 8


def test_bf16_operands_come_as_near_as_their_rounding_allows():
    args = gemm_args(torch.randn(256, 512), torch.randn(256, 512))
    bf16 = peers.ADAPTERS["fp8_gemm"]["cuBLAS bf16"]
    assert 48 < check.sqnr_db(bf16(*bf16.prepare(*args)), mxspec.fp8_gemm(*args)) < 52


def test_groups_are_prepared_as_deepgemm_and_torch_read_them():
    adapters, (case, *_) = peers.ADAPTERS["fp8_grouped_gemm"], dispatch.reference("fp8_grouped_gemm").spec.cases()
    a, a_scale, b, _, offs = args = case.args()
    _, prepared, _, prepared_b, layout = adapters["DeepGEMM"].prepare(*args, **case.kwargs)
    assert prepared.stride() == (1, len(a))
    assert prepared[: offs[-1]].equal(a_scale[: offs[-1]])  # the rest is NaN
    assert (prepared_b.stride(), layout.shape) == ((6, 3, 1), (len(a),))
    a_bf16, _, b_bf16, *_ = adapters["torch bf16"].prepare(*args, **case.kwargs)
    assert (a_bf16.shape, b_bf16.shape) == (a.shape, b.shape)
    expected = mxspec.fp8_grouped_gemm(*args)
    first = a_bf16[: offs[0]].float() @ b_bf16[0].float().T
    assert check.sqnr_db(first, expected[: offs[0]]) > 45


@pytest.mark.parametrize("kwargs", [{"scale_layout": "plain"}, {}], ids=["plain", "blocked"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float4_e2m1fn_x2])
def test_tokens_by_e2m1_weights_become_bfloat16(dtype, kwargs):
    """Tokens in bfloat16 stay as they are. Those in codes are near their values."""
    args = mx_groups.made([5, 0, 30], 3, 40, 96, kwargs.get("scale_layout", "blocked"), (dtype, E2M1))
    a, _, b, *_ = peers.ADAPTERS["mx_grouped_gemm"]["torch bf16"].prepare(*args, **kwargs)
    assert (a.dtype, b.dtype, b.shape) == (torch.bfloat16, torch.bfloat16, (3, 40, 96))
    assert dtype != torch.bfloat16 or a is args[0]
    expected = dispatch.reference("mx_grouped_gemm")(*args, **kwargs)
    got = torch.cat([a[:5] @ b[0].t(), a[5:35] @ b[2].t()])
    assert (got - expected[:35]).norm() < 0.05 * expected.norm()
