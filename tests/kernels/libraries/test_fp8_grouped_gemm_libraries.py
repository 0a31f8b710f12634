"""The FP8 grouped matmuls in DeepGEMM, without a GPU or the library: its arguments, and refused calls."""

import sys
from types import SimpleNamespace

import pytest
import torch

from mxspec import check, dispatch
from mxspec.cases import fp8_grouped_gemm as cases
from mxspec.cases import fp8_grouped_gemm_wgrad as wgrad_cases
from mxspec.deepgemm_kernels import _library, fp8_grouped_gemm, fp8_grouped_gemm_wgrad, fp8_grouped_gemm_wgrad_
from mxspec.reference.fp8_gemm import MIN_SQNR_DB, fp8_gemm
from tests.helpers import ends

GROUPED, WGRAD, WGRAD_ = (dispatch.reference(f"fp8_grouped_gemm{end}") for end in ("", "_wgrad", "_wgrad_"))


def strides_for_tma(rows):
    return 1, rows + -rows % 4


def m_grouped_fp8_gemm_nt_contiguous(a, b, d, grouped_layout, recipe=None):
    """DeepGEMM's contract on Hopper, as its sources state it, computed by the reference.

    A block has its first row's expert.
    """
    (a, a_scale), (b, b_scale) = a, b
    (M, K), (E, N, _) = a.shape, b.shape
    assert recipe == (1, 128, 128)
    assert (d.shape, d.dtype, d.is_contiguous()) == ((M, N), torch.bfloat16, True)
    assert (grouped_layout.shape, grouped_layout.dtype, grouped_layout.is_contiguous()) == ((M,), torch.int32, True)
    assert a_scale.stride() == strides_for_tma(M)
    assert b_scale.stride() == (-(-N // 128) * (K // 128), K // 128, 1)
    assert N % 8 == 0
    assert all(t.data_ptr() % 16 == 0 for t in (a, a_scale, b, b_scale, d))
    # DeepGEMM reads it, whether it exists or not.
    last = grouped_layout.as_strided((1,), (1,), (M - 1) // 128 * 128 + 64)
    for block in range(0, M, 128):
        rows = slice(block, min(block + 128, M))
        experts = [*grouped_layout[rows], *([last] if rows.stop == M else [])]
        assert len(set(map(int, experts))) == 1
        expert = int(experts[0])
        assert -1 <= expert < E
        d[rows] = fp8_gemm(a[rows], a_scale[rows], b[expert], b_scale[expert]) if expert >= 0 else 0


def k_grouped_fp8_gemm_nt_contiguous(a, b, d, ks, ks_tensor, c=None, recipe=None):
    (a, a_scale), (b, b_scale) = a, b
    E, M, N = d.shape
    tokens = sum(ks)
    assert (recipe, c is d, d.dtype, d.is_contiguous()) == ((1, 1, 128), True, torch.float32, True)
    assert (ks_tensor.tolist(), ks_tensor.dtype, len(ks)) == (ks, torch.int32, E)
    assert all(k >= 0 and k % 128 == 0 for k in ks)
    assert (a.shape, b.shape) == ((tokens * M,), (tokens * N,))
    for scale, rows in ((a_scale, M), (b_scale, N)):
        assert (scale.shape, scale.stride()) == ((rows, tokens // 128), strides_for_tma(rows))
    begin = 0
    for e, k in enumerate(ks):  # each group is a row-major matrix of its own
        groups = (t[rows * begin : rows * (begin + k)].view(rows, k) for t, rows in ((a, M), (b, N)))
        blocks = slice(begin // 128, (begin + k) // 128)
        left, right = groups
        d[e] += fp8_gemm(left, a_scale[:, blocks], right, b_scale[:, blocks], out_dtype=torch.float32)
        begin += k


FUNCTIONS = {f.__name__: f for f in (m_grouped_fp8_gemm_nt_contiguous, k_grouped_fp8_gemm_nt_contiguous)}


@pytest.fixture
def there(monkeypatch):
    """A Hopper GPU of two processors with the library, as far as `supports` can tell."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    few = SimpleNamespace(multi_processor_count=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: few)
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace(**FUNCTIONS))
    caches = (_library.library, _library.absent, _library.processors)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


# --- tokens by weights --------------------------------------------------------------------------------------------


def test_golden_grouped_layout():
    layout = fp8_grouped_gemm.grouped_layout(ends(128, 128, 384), 448)
    assert layout.dtype == torch.int32
    assert layout.tolist() == [0] * 128 + [2] * 256 + [-1] * 64
    assert fp8_grouped_gemm.grouped_layout(ends(0, 256), 256).tolist() == [1] * 256
    assert fp8_grouped_gemm.grouped_layout(ends(0, 0), 3).tolist() == [-1] * 3
    # The group of its first row.
    assert fp8_grouped_gemm.grouped_layout(ends(100, 256), 256).tolist() == [0] * 128 + [1] * 128


@pytest.mark.parametrize(
    ("sizes", "rest"), [([128, 256], 0), ([128, 0, 256], 128), ([0, 0, 128, 0], 20), ([384], 0), ([0, 0], 100)]
)
def test_what_the_quantizers_give_fits_as_it_is(sizes, rest, there):
    args = cases.made(sizes, rest, 136, 256, 1, "mn")  # NaN in rows of no group
    assert fp8_grouped_gemm.supports(*args, alignment=128) is None
    with check.poisoned(0xFF):
        out = fp8_grouped_gemm.fp8_grouped_gemm(*args, alignment=128)
    assert check.difference((out,), (GROUPED(*args),), MIN_SQNR_DB) is None


def test_what_does_not_fit_is_refused_with_the_reason(there):
    a, a_scale, b, b_scale, offs = args = cases.made([128, 256], 0, 136, 256, 1, "mn")
    odd = cases.made([128], 2, 136, 256, 1, "mn")
    blocks = "takes groups of whole 128-row blocks: needs alignment in multiples of 128, not alignment = "
    for wrong, reason, options in [
        (args, blocks + "1", {"alignment": 1}),
        (args, blocks + "192", {"alignment": 192}),
        (args, "gives torch.bfloat16, not torch.float32", {"out_dtype": torch.float32}),
        ((a[:0], a_scale[:0], b, b_scale, offs), "takes no empty matrices", {}),
        ((a[:1], a_scale[:1], b, b_scale, offs), "does not read the scales of a single row", {}),
        ((a, a_scale, b[:, :132], b_scale, offs), "needs N in multiples of 8, not N = 132", {}),
        ((a, a_scale.contiguous(), b, b_scale, offs), "needs a_scale with strides (1, 384), not (2, 1)", {}),
        ((a, a_scale, b, b_scale.mT.contiguous().mT, offs), "needs b_scale with strides (4, 2, 1), not (4, 1, 2)", {}),
        ((a, a_scale, b.repeat(1, 2, 1)[:, :136], b_scale, offs), "needs b with strides (34816, 256, 1)", {}),
        (odd, "needs a_scale with strides (1, 132), not (1, 130)", {}),
    ]:
        assert (fp8_grouped_gemm.supports(*wrong, **({"alignment": 256} | options)) or "").startswith(reason), reason
    unaligned = torch.zeros(a.numel() + 1, dtype=torch.uint8).view(a.dtype)[1:].view(a.shape)
    reason = fp8_grouped_gemm.supports(unaligned, *args[1:], alignment=128)
    assert reason == "needs a to begin at a multiple of 16 bytes"


# --- the gradient of the weights ----------------------------------------------------------------------------------

N, K = 256, 136


@pytest.mark.parametrize(
    ("sizes", "rest"), [([128, 256], 0), ([128, 0, 256, 128, 128], 128), ([0, 0, 384], 0), ([0, 0], 128)]
)
def test_what_the_group_quantizer_gives_is_added_as_it_is(sizes, rest, there):
    args = wgrad_cases.made(sizes, rest, N, K)
    assert fp8_grouped_gemm_wgrad.supports(*args) is None
    with check.poisoned(0xFF):
        out = fp8_grouped_gemm_wgrad.fp8_grouped_gemm_wgrad(*args)
    assert check.difference((out,), (WGRAD(*args),), MIN_SQNR_DB) is None
    acc = torch.full((len(sizes), N, K), 2.0**18)
    expected = acc.clone()
    WGRAD_(expected, *args)
    assert fp8_grouped_gemm_wgrad_.supports(acc, *args) is None
    assert fp8_grouped_gemm_wgrad_.fp8_grouped_gemm_wgrad_(acc, *args) is None
    assert check.sqnr_db(acc, expected) > 130


@pytest.mark.parametrize("offs", [(128, 200), (256, 128), (128, 640), (-128, 256)])
def test_an_offs_that_would_hang_raises(offs, there):
    args = wgrad_cases.made([128, 256], 0, N, K)[:4]
    text = rf"fp8_grouped_gemm_wgrad: offs = \[{offs[0]}, {offs[1]}\]; DeepGEMM needs multiples of 128 .* up to R = 384"
    with pytest.raises(ValueError, match=text):
        fp8_grouped_gemm_wgrad.fp8_grouped_gemm_wgrad(*args, ends(*offs))
    with pytest.raises(ValueError, match="fp8_grouped_gemm_wgrad_: offs"):
        fp8_grouped_gemm_wgrad_.fp8_grouped_gemm_wgrad_(torch.zeros(2, N, K), *args, ends(*offs))


def test_sums_that_do_not_fit_are_refused_with_the_reason(there, monkeypatch):
    args = wgrad_cases.made([128, 256], 0, N, K)
    supports = fp8_grouped_gemm_wgrad.supports
    assert supports(*args, out_dtype=torch.bfloat16) == "gives torch.float32, not torch.bfloat16"
    assert supports(*wgrad_cases.made([128], 0, N, 138)) == "needs K in multiples of 4, not K = 138"
    assert supports(*wgrad_cases.made([128], 0, 384, K)) == "needs N in multiples of 256, not N = 384"
    assert supports(*wgrad_cases.made([0, 0], 0, N, K)) == "takes no empty matrices"
    dy, dy_scale, *rest = args
    assert supports(dy, dy_scale.contiguous(), *rest) == "needs dy_scale with strides (1, 256), not (3, 1)"
    wide = torch.zeros(2, N, 2 * K)[..., :K]
    assert fp8_grouped_gemm_wgrad_.supports(wide, *args).startswith("needs acc with strides (34816, 136, 1)")
    many = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: many)
    _library.processors.cache_clear()
    meta = [t.to("meta") for t in wgrad_cases.made([128], 0, 768, 1536)]
    assert supports(*meta) == "needs 132 tiles of 128 x 160 in a group's matrix; 768 x 1536 has 60"
    assert supports(*(t.to("meta") for t in wgrad_cases.made([128], 0, 2048, 1536))) is None


@pytest.mark.parametrize("end", ["_wgrad", "_wgrad_"])
def test_auto_never_takes_sums_that_wait_for_the_device(end):
    module = dispatch.kernel_module(f"fp8_grouped_gemm{end}", "deepgemm")
    reason = "waits for the device (it needs the sizes of the groups on the host), so it is used only if chosen by name"
    assert dispatch.resolve.unranked(module, torch.device("cuda", 0)) == reason


# --- missing functions and GPUs -----------------------------------------------------------------------------------


def test_a_build_without_a_function_is_refused_by_its_name(there, monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace())
    grouped = cases.made([128], 0, 136, 256, 1, "mn")
    lacks = ", which this build of deep_gemm lacks"
    reason = fp8_grouped_gemm.supports(*grouped, alignment=128)
    assert reason == f"needs m_grouped_fp8_gemm_nt_contiguous{lacks}"
    args = wgrad_cases.made([128], 0, N, K)
    assert fp8_grouped_gemm_wgrad.supports(*args) == f"needs k_grouped_fp8_gemm_nt_contiguous{lacks}"
    acc = torch.zeros(1, N, K)
    assert fp8_grouped_gemm_wgrad_.supports(acc, *args) == f"needs k_grouped_fp8_gemm_nt_contiguous{lacks}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run there")
def test_on_a_cpu_they_are_refused_by_name():
    args = cases.made([128], 0, 136, 256, 1, "mn")
    with pytest.raises(ValueError, match="fp8_grouped_gemm: backend 'deepgemm' runs on CUDA tensors only"):
        dispatch.public("fp8_grouped_gemm")(*args, backend="deepgemm")
