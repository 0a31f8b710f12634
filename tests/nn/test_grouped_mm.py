"""mx_grouped_mm, fp8_grouped_mm and nvfp4_grouped_mm: products and gradients, and refusals."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import mxspec
from mxspec.check import default_device, sqnr_db
from mxspec.nn import RECIPES, _bf16, fp8_grouped_mm, mx_grouped_mm, nvfp4_grouped_mm
from mxspec.nn.recipe import recipe_of

DEVICE = default_device()
FEATURES = {"mxfp8": (64, 96), "bf16": (64, 96), "fp8_128": (128, 256), "nvfp4": (64, 80)}  # K and N
LOW = [name for name, recipe in RECIPES.items() if recipe.format not in ("bf16", "nvfp4")]
NOT_NVFP4 = [name for name, recipe in RECIPES.items() if recipe.format != "nvfp4"]  # test_nvfp4.py tests its products
E5M2 = replace(RECIPES["mxfp8_rceil"], grad_dtype=torch.float8_e5m2)
SIZES = {  # the number of tokens of each expert, and the number of rows in no group
    "ragged, and one without tokens": ([33, 0, 67, 1], 0),
    "rows of no group": ([5, 40, 0], 11),
    "all to one": ([0, 0, 70], 0),
    "one token": ([0, 1], 0),
}


def operands(recipe, sizes, rest, x_dtype=torch.float32, w_dtype=torch.float32):
    torch.manual_seed(0)
    M, E, (K, N) = sum(sizes) + rest, len(sizes), FEATURES[recipe_of(recipe, "the test").format]
    x = torch.randn(M, K, device=DEVICE, dtype=x_dtype, requires_grad=True)
    w = torch.randn(E, N, K, device=DEVICE, dtype=w_dtype, requires_grad=True)
    dy = (torch.randn(M, N, device=DEVICE) * torch.linspace(0.01, 3, N, device=DEVICE)).to(x_dtype)
    return x, w, torch.tensor(sizes, device=DEVICE).cumsum(0, dtype=torch.int32), dy


def grouped_mm(x, w, offs, recipe):
    """Call the function that takes the recipe."""
    functions = {"fp8_128": fp8_grouped_mm, "nvfp4": nvfp4_grouped_mm}
    fn = functions.get(recipe_of(recipe, "the test").format, mx_grouped_mm)
    return fn(x, w, offs, recipe)


def step(recipe, x, w, offs, dy, fn=grouped_mm):
    x.grad = w.grad = None
    torch.manual_seed(1)  # of nvfp4's backward
    out = fn(x, w, offs, recipe)
    out.backward(dy)
    return [out.detach(), x.grad, w.grad]


REFERENCE = {"backend": "reference"}
BACK = {"out_dtype": torch.float32, **REFERENCE}


def read_back(values: torch.Tensor, axis: int, recipe, dtype=torch.float8_e4m3fn) -> torch.Tensor:
    """The values in fp64 after quantizing, for bf16 after rounding. Blocks along the tokens are filled with zeros."""
    if recipe.format == "bf16":
        return values.bfloat16().double()
    rows, block = values.shape[-2], 128 if recipe.format == "fp8_128" else 32
    padded = nn.functional.pad(values, (0, 0, 0, -rows % block if axis == -2 else 0))
    if recipe.format == "fp8_128":
        codes = mxspec.fp8_quantize_1x128(padded, axis=axis, scale_format=recipe.scale_format, **REFERENCE)
        return mxspec.fp8_dequantize(*codes, axis=axis, **BACK)[:rows].double()
    codes = mxspec.mx_quantize(padded, axis=axis, elem_dtype=dtype, scaling=recipe.scaling, **REFERENCE)
    return mxspec.mx_dequantize(*codes, axis=axis, **BACK)[:rows].double()


def weights_back(w: torch.Tensor, axis: int, recipe) -> torch.Tensor:
    if recipe.format != "fp8_128":
        return read_back(w, axis, recipe)
    codes = mxspec.fp8_quantize_128x128(w, scale_format=recipe.scale_format, **REFERENCE)
    return mxspec.fp8_dequantize(*codes, **BACK).double()


def dequantized_step(x, w, offs, dy, recipe):
    """The expected results of the matmuls, expert by expert: fp64 products of operands that were read back."""
    x, w, recipe = x.detach(), w.detach(), recipe_of(recipe, "the test")
    out, grad_x, grad_w = (torch.zeros_like(t, dtype=torch.float64) for t in (dy, x, w))
    first = 0
    for e, end in enumerate(offs.tolist()):
        rows = slice(first, end)
        first = end
        out[rows] = read_back(x[rows], -1, recipe) @ weights_back(w[e], -1, recipe).mT
        grad_x[rows] = read_back(dy[rows], -1, recipe, recipe.grad_dtype) @ weights_back(w[e], -2, recipe)
        if recipe.wgrad_bf16:
            grad_w[e] = dy[rows].bfloat16().double().mT @ x[rows].bfloat16().double()
        else:
            grad_w[e] = read_back(dy[rows], -2, recipe, recipe.grad_dtype).mT @ read_back(x[rows], -2, recipe)
    return [out, grad_x, grad_w]


@pytest.mark.parametrize("groups", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("recipe", [*NOT_NVFP4, E5M2], ids=str)
def test_the_products_are_those_of_the_dequantized_operands(groups, recipe):
    call = operands(recipe, *groups)
    found = recipe_of(recipe, "the test")
    got = step(recipe, *call)
    for i, (g, expected) in enumerate(zip(got, dequantized_step(*call, recipe), strict=True)):
        assert g.dtype == torch.float32
        assert sqnr_db(g, expected) >= (48 if found.format == "bf16" or (i == 2 and found.wgrad_bf16) else 70)


@pytest.mark.parametrize("recipe", ["mxfp8_rceil", "fp8_128", "bf16"])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_bfloat16_and_its_masters(recipe, dtypes):
    call = operands(recipe, [33, 0, 67, 1], 3, *dtypes)
    got = step(recipe, *call)
    assert [t.dtype for t in got] == [dtypes[0], dtypes[0], dtypes[1]]
    for g, expected in zip(got, dequantized_step(*call, recipe), strict=True):
        assert sqnr_db(g, expected) >= (48 if recipe == "bf16" else 50)  # rounded to bfloat16 once


@pytest.mark.parametrize("recipe", LOW)
def test_near_bfloat16(recipe):
    call = operands(recipe, [80, 0, 150], 0)
    bf16 = step("bf16", *call)
    for got, expected, least in zip(step(recipe, *call), bf16, (27, 25, 24), strict=True):
        assert sqnr_db(got, expected) >= least


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_belongs_to_no_group_is_not_read_and_is_zero(recipe):
    x, w, offs, dy = operands(recipe, [5, 40, 0], 11)
    before = step(recipe, x, w, offs, dy)
    with torch.no_grad():
        x[45:], dy[45:], w[2] = torch.nan, torch.nan, torch.nan
    after = step(recipe, x, w, offs, dy)
    for got, expected in zip(after, before, strict=True):
        assert torch.equal(got, expected)
    assert not after[0][45:].any()
    assert not after[1][45:].any()
    assert not after[2][2].any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_tokens_at_all(recipe):
    x, w, offs, dy = operands(recipe, [0, 0], 0)
    out, grad_x, grad_w = step(recipe, x, w, offs, dy)
    assert (out.shape, grad_x.shape, grad_w.shape) == (dy.shape, x.shape, w.shape)
    assert not grad_w.any()
    x, offs = x.detach()[:, :1].expand_as(x).requires_grad_(), torch.zeros_like(offs)
    grouped_mm(x, w, offs, recipe).sum().backward()  # the tokens and their gradient have strides 0
    assert x.grad.shape == x.shape


ROWS, COLUMNS = ("mx_quantize_groups", -1), ("mx_quantize_groups", -2)
OPS = {  # the ops for weights, rows, both directions, columns, gemm and wgrad; the quantizers with their axis
    "mxfp8_rceil": (
        ("mx_quantize_rowcol", None), [ROWS], [ROWS, COLUMNS], [COLUMNS], "mx_grouped_gemm", "mx_grouped_gemm_wgrad",
    ),
    "fp8_128": (
        ("fp8_quantize_128x128", None), [("fp8_quantize_1x128", None)], [("fp8_quantize_rowcol_groups", None)],
        [("fp8_quantize_k_groups", None)], "fp8_grouped_gemm", "fp8_grouped_gemm_wgrad",
    ),
}  # fmt: skip


@pytest.mark.parametrize("recipe", OPS)
def test_only_the_gradients_that_are_needed_in_the_dtypes_that_are_needed(recipe, monkeypatch):
    bf16, fp32 = torch.bfloat16, torch.float32
    x, w, offs, dy = operands(recipe, [33, 30], 0, fp32, bf16)
    weights, rows, both, columns, gemm, wgrad = OPS[recipe]
    ran = []
    for name in {weights[0], gemm, wgrad, *(op for op, _ in (*rows, *both, *columns))}:
        op = getattr(mxspec, name)

        def recorded(*args, op=op, name=name, **kw):
            ran.append((name, kw.get("axis", kw.get("out_dtype"))))
            return op(*args, **kw)

        monkeypatch.setattr(mxspec, name, recorded)
    grouped_mm(x.detach(), w, offs, recipe).backward(dy)
    assert ran == [weights, *both, (gemm, fp32), *columns, (wgrad, bf16)]
    ran.clear()
    grouped_mm(x, w.detach(), offs, recipe).backward(dy)
    assert ran == [weights, *rows, (gemm, fp32), *rows, (gemm, fp32)]
    assert w.grad is not None


@pytest.mark.parametrize("recipe", OPS)
def test_of_the_tokens_one_byte_an_element_is_kept(recipe):
    x, w, offs, _ = operands(recipe, [128, 256], 0, torch.bfloat16)  # on Hopper, bf16 weights would keep bf16 values
    out = grouped_mm(x, w, offs, recipe)
    kept = [t for t in out.grad_fn.saved_tensors if t is not None and t.itemsize == 1]
    codes = sorted(t.numel() for t in kept if t.dtype == torch.float8_e4m3fn)
    rows = 384 + 2 * 128  # the tokens, and the padding that two groups may need
    assert codes == sorted([w.numel(), rows * x.shape[1]])
    assert not any(t.dtype == torch.bfloat16 for t in out.grad_fn.saved_tensors if t is not None)


def test_bfloat16_keeps_the_operand_that_a_gradient_needs():
    x, w, offs, dy = operands("bf16", [33, 30], 0, torch.bfloat16, torch.bfloat16)
    expected = step("bf16", x, w, offs, dy)
    x.grad = w.grad = None
    for inputs, kept in (((x.detach(), w), x), ((x, w.detach()), w)):
        out = grouped_mm(*inputs, offs, "bf16")
        assert [t.shape for t in out.grad_fn.saved_tensors if t is not None] == [kept.shape, offs.shape]
        out.backward(dy)
    assert torch.equal(x.grad, expected[1])
    assert torch.equal(w.grad, expected[2])


# The tests of GroupedExperts compile the functions of mxfp8_rceil and fp8_128.
@pytest.mark.parametrize("recipe", ["mxfp8_rceil_wgrad_bf16", "bf16"])
def test_compiled_whole_it_gives_the_same_bits(recipe):
    torch._dynamo.reset()
    call = operands(recipe, [33, 0, 67, 1], 3)
    compiled = torch.compile(grouped_mm, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, step(recipe, *call, compiled), step(recipe, *call)))


@pytest.mark.parametrize("recipe", ["mxfp8_rceil", "fp8_128"])
def test_autocast_casts_the_tokens(recipe):
    x, w, offs, _ = operands(recipe, [33, 30], 0)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        out = grouped_mm(x, w, offs, recipe)
    assert torch.equal(out, grouped_mm(x.bfloat16(), w, offs, recipe))
    out.sum().backward()
    assert (x.grad.dtype, w.grad.dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            lambda x, w, o: (x, w, o, "fp8_128"),
            ValueError,
            "mx_grouped_mm: the recipe's format is fp8_128; needs mxfp8 or bf16. Use fp8_grouped_mm",
        ),
        (lambda x, w, o: (x, w, o, "mxfp4"), ValueError, "unknown recipe 'mxfp4'"),
        (lambda x, w, o: (x[:, :32], w, o), ValueError, r"input has shape \(63, 32\); needs \(..., 64\)"),
        (lambda x, w, o: (x[None], w, o), ValueError, r"x has shape \(1, 63, 64\).*needs \(M, K\) and \(E, N, K\)"),
        (lambda x, w, o: (x, w[0], o), ValueError, r"w \(96, 64\); needs"),
        (lambda x, w, o: (x, w[:, :40], o), ValueError, "N = 40 must be a multiple of 32"),
        (lambda x, w, o: (x[:, :40], w[..., :40], o), ValueError, "K = 40 must be a multiple of 32"),
        (lambda x, w, o: (x, w, o[:1]), ValueError, r"offs has shape \(1,\); needs \(2,\) for 2 experts"),
        (lambda x, w, o: (x, w[:0], o[:0]), ValueError, "w has 0 experts; needs at least 1"),
        (lambda x, w, o: (x, w, o.long()), TypeError, "offs has dtype torch.int64; needs torch.int32"),
        (lambda x, w, o: (x, w, o.to("meta")), ValueError, "offs is on meta"),
        (lambda x, w, o: (x.half(), w, o), TypeError, "input has dtype torch.float16"),
        (lambda x, w, o: (x, w.half(), o), TypeError, "parameters have dtype torch.float16"),
    ],
)
def test_what_it_does_not_take(change, error, words):
    x, w, offs, _ = operands("mxfp8_rceil", [33, 30], 0)
    with pytest.raises(error, match=words):
        mx_grouped_mm(*change(x, w, offs))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda x, w, o: (x, w, o, E5M2),
            "fp8_grouped_mm: the recipe's format is mxfp8; needs fp8_128 or bf16. Use mx_grouped_mm",
        ),
        (lambda x, w, o: (x, w[:, :104], o), "fp8_grouped_mm: N = 104 must be a multiple of 16"),
        (lambda x, w, o: (x[:, :72], w[..., :72], o), "fp8_grouped_mm: K = 72 must be a multiple of 16"),
        (lambda x, w, o: (x, w, o[:1]), r"fp8_grouped_mm: offs has shape \(1,\)"),
    ],
)
def test_what_that_of_fp8_does_not_take(change, words):
    x, w, offs, _ = operands("fp8_128", [33, 30], 0)
    with pytest.raises(ValueError, match=words):
        fp8_grouped_mm(*change(x, w, offs))


def test_bfloat16_may_be_asked_of_both():
    x, w, offs, _ = operands("bf16", [33, 30], 0)
    assert torch.equal(fp8_grouped_mm(x, w, offs, "bf16"), mx_grouped_mm(x, w, offs, "bf16"))


def test_bfloat16s_grouped_matmul_leaves_no_garbage(monkeypatch):
    """PyTorch leaves rows in no group, and experts without tokens, uninitialized."""
    monkeypatch.setattr(
        _bf16,
        "grouped_mm",
        lambda a, b, offs: torch.full((*b.shape[:-2], a.shape[-2], b.shape[-1]), 7.0).squeeze(0),
    )
    K, N = 64, 96
    offs = torch.tensor([3, 3], dtype=torch.int32)
    out = _bf16.gemm_bf16(torch.ones(5, K), torch.ones(1, K, N), offs)
    assert out[:, 0].tolist() == [7, 7, 7, 0, 0]
    monkeypatch.setattr(_bf16, "grouped_mm", lambda a, b, offs: torch.full((2, N, K), 7.0))
    wgrad = _bf16.wgrad_bf16(torch.ones(5, N), torch.ones(5, K), offs)
    assert wgrad[:, 0, 0].tolist() == [7, 0]


@pytest.fixture
def products(monkeypatch):
    """The results of PyTorch's grouped matmul, with NaN in every element that it may leave uninitialized."""
    results = []

    def grouped(a, b, offs):
        out = torch.nn.functional.grouped_mm(a, b, offs=offs)
        begins = torch.cat([offs.new_zeros(1), offs[:-1]])
        out[offs == begins if out.ndim == 3 else torch.arange(len(out), device=DEVICE) >= offs[-1]] = torch.nan
        results.append(out)
        return out

    monkeypatch.setattr(_bf16, "grouped_mm", grouped)
    return results


NO_TOKENS = {"no row": ([0, 0, 0], 0), "no row in a group": ([0, 0, 0], 9)}


@pytest.mark.parametrize("groups", [*SIZES.values(), *NO_TOKENS.values()], ids=[*SIZES, *NO_TOKENS])
def test_bfloat16_gives_the_bits_of_pytorch_and_zeros_where_it_writes_nothing(groups, products):
    x, w, offs, dy = operands("bf16", *groups, torch.bfloat16, torch.bfloat16)
    got = step("bf16", x, w, offs, dy)
    assert len(products) == 3
    assert not any(t.isnan().any() for t in products)  # zeroed in place, not in a copy
    calls = (x.detach(), w.detach().mT), (dy, w.detach()), (dy.mT, x.detach())
    expected = [torch.zeros_like(t) for t in got]
    if len(x):
        expected = [torch.nn.functional.grouped_mm(a, b, offs=offs) for a, b in calls]
    used, filled = sum(groups[0]), [size > 0 for size in groups[0]]
    expected[0][used:], expected[1][used:] = 0, 0
    expected[2][[not full for full in filled]] = 0
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))
    assert got[2].flatten(1).any(1).tolist() == filled


@pytest.mark.parametrize("chosen", ["reference", "deepgemm"])  # deepgemm has no kernel that writes zeros
def test_bfloat16_writes_zeros_by_an_op_whatever_backend_is_chosen(chosen, monkeypatch):
    call, shapes, op = operands("bf16", [33, 0, 30], 4), [], mxspec.zero_unused_
    monkeypatch.setattr(mxspec, "zero_unused_", lambda x, *args, **kw: shapes.append(x.shape) or op(x, *args, **kw))
    expected = step("bf16", *call)
    assert shapes == [(67, 96), (67, 64), (3, 96, 64)]
    with mxspec.use_backend(chosen):
        assert all(map(torch.equal, step("bf16", *call), expected))


def test_selective_checkpointing_may_save_bfloat16s_products():
    x, w, offs, dy = operands("bf16", [5, 40, 0], 11)
    saves = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten._grouped_mm.default])
    again = functools.partial(checkpoint, grouped_mm, use_reentrant=False, context_fn=saves)
    assert all(map(torch.equal, step("bf16", x, w, offs, dy, again), step("bf16", x, w, offs, dy)))
