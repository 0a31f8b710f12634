"""pad_token_groups, place_token_groups, unpad_token_groups: rows by hand, peers' rows, gradients, no host waits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mxspec
from mxspec.spec import random_normal
from tests.helpers import ends, published

VECTORS = published("groups")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def rows(*values, dtype=torch.int16):
    return torch.tensor(values, dtype=dtype)[:, None]


# tokens, offs, alignment -> padded, start, end
GOLDENS = [
    ([1, 2, 3], [2, 3], 2, [1, 2, 3, 0, 0, 0, 0, 0], [0, 2], [2, 4]),
    ([1, 2, 3], [0, 3, 3], 4, [1, 2, 3, *[0] * 13], [0, 0, 4], [0, 4, 4]),
    ([1, 2, 9, 9], [1, 2], 3, [1, 0, 0, 2, *[0] * 8], [0, 3], [3, 6]),  # 9 lies past the last group
    ([1, 2], [1, 2], 1, [1, 2, 0, 0], [0, 1], [1, 2]),
    ([], [0], 8, [0] * 8, [0], [0]),
    ([7], [], 8, [0] * 8, [], []),
]


@pytest.mark.parametrize(("tokens", "offs", "alignment", "padded", "start", "end"), GOLDENS)
def test_golden(tokens, offs, alignment, padded, start, end):
    got = mxspec.pad_token_groups(rows(*tokens), ends(*offs), alignment, backend="reference")
    assert [t.flatten().tolist() for t in got] == [padded, start, end]
    assert [t.dtype for t in got] == [torch.int16, torch.int32, torch.int32]


@pytest.mark.parametrize("case", ["P0", "P1", "P2"])
def test_vectors_of_torchao_main(case):
    x, offs, alignment, *expected = (
        torch.from_numpy(VECTORS[f"{case}.{part}"]) for part in ("in", "offs", "align", "out", "start", "end")
    )
    got = mxspec.pad_token_groups(x, offs, int(alignment), backend="reference")
    assert all(g.equal(e) for g, e in zip(got, expected, strict=True))


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), max_size=12),
    rest=st.integers(0, 9),
    alignment=st.integers(1, 48),
    K=st.integers(1, 5),
)
def test_unpad_inverts_pad(sizes, rest, alignment, K):
    """Against a loop over the groups, as a person would write it."""
    offs, M = torch.tensor(sizes).cumsum(0, dtype=torch.int32), sum(sizes) + rest
    x = torch.arange(1, M * K + 1, dtype=torch.int32).reshape(M, K)
    padded, start, end = mxspec.pad_token_groups(x, offs, alignment)
    assert padded.shape[0] == -(-(M + len(sizes) * alignment) // alignment) * alignment
    expected, place = torch.zeros_like(padded), 0
    for g, size in enumerate(sizes):
        assert start[g] == place
        expected[place : place + size] = x[int(offs[g]) - size : int(offs[g])]
        place += -(-size // alignment) * alignment
        assert end[g] == place
    assert padded.equal(expected)
    back = mxspec.unpad_token_groups(padded, offs, start, M)
    assert back[: sum(sizes)].equal(x[: sum(sizes)])
    assert not back[sum(sizes) :].any()
    assert mxspec.place_token_groups(x, offs, start, padded.shape[0]).equal(padded)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_gradient_of_pad_is_unpad(compiled):
    torch._dynamo.reset()
    x, offs = torch.randn(9, 4, requires_grad=True), ends(3, 3, 7)
    pad = mxspec.pad_token_groups
    padded, start, _ = (torch.compile(pad, backend="aot_eager", fullgraph=True) if compiled else pad)(x, offs, 4)
    weight = torch.arange(1, padded.numel() + 1, dtype=torch.float32).reshape(padded.shape)
    (padded * weight).sum().backward()
    assert x.grad[:3].equal(weight[:3])
    assert x.grad[3:7].equal(weight[4:8])
    assert not x.grad[7:].any()  # dropped rows
    assert not start.requires_grad


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(0, 6), min_size=1, max_size=9), data=st.data())
def test_groups_lie_in_any_order(sizes, data):
    """Forward and gradient, against loops over the groups; gaps and empty groups anywhere."""
    order, M = data.draw(st.permutations(range(len(sizes)))), sum(sizes) + 2
    begins, rows = [0] * len(sizes), data.draw(st.integers(0, 2))
    for g in order:
        begins[g] = rows
        rows += sizes[g] + data.draw(st.integers(0, 2))
    offs, start = torch.tensor(sizes).cumsum(0, dtype=torch.int32), ends(*begins)
    x = torch.arange(1.0, 2 * M + 1).reshape(M, 2).requires_grad_()
    padded = torch.arange(1.0, 2 * rows + 1).reshape(rows, 2).requires_grad_()
    placed, tokens = torch.zeros(rows, 2), torch.zeros(M, 2)
    for end, size, begin in zip(offs.tolist(), sizes, begins, strict=True):
        placed[begin : begin + size] = x.detach()[end - size : end]
        tokens[end - size : end] = padded.detach()[begin : begin + size]
    got_placed = mxspec.place_token_groups(x, offs, start, rows)
    got_tokens = mxspec.unpad_token_groups(padded, offs, start, M)
    assert got_placed.equal(placed)
    assert got_tokens.equal(tokens)
    # The ops are linear: the gradient of each is the other's loop, applied to the incoming gradient.
    (of_x,) = torch.autograd.grad(got_placed, x, padded.detach())
    (of_padded,) = torch.autograd.grad(got_tokens, padded, x.detach())
    assert of_x.equal(tokens)
    assert of_padded.equal(placed)


@pytest.mark.filterwarnings("ignore:Input #")  # the warning that the input is not double
def test_gradients_agree_with_finite_differences():
    """In fp32, where sums of a few numbers are exact enough; the ops are linear."""
    offs = ends(2, 2, 5)
    x = torch.randn(6, 3, requires_grad=True)
    padded, start, _ = mxspec.pad_token_groups(x, offs, 2)
    for fn, arg in [
        (lambda t: mxspec.pad_token_groups(t, offs, 2)[0], x),
        (lambda t: mxspec.unpad_token_groups(t, offs, start, 6), padded.detach().requires_grad_()),
        (lambda t: mxspec.place_token_groups(t, offs, start, 13), x),
        (lambda t: mxspec.place_token_groups(t, offs, ends(8, 9, 1), 13), x),
        (lambda t: mxspec.unpad_token_groups(t, offs, ends(8, 9, 1), 6), padded.detach().requires_grad_()),
    ]:
        torch.autograd.gradcheck(fn, (arg,), eps=1.0, atol=1e-5, rtol=1e-5, nondet_tol=0.0)
        torch.autograd.gradgradcheck(fn, (arg,), eps=1.0, atol=1e-5, rtol=1e-5)


def test_backward_runs_on_the_backend_of_forward(monkeypatch):
    ran = []
    run = mxspec.dispatch.resolve.run

    def spy(fn, args, kwargs, backend):
        ran.append((fn.__name__, backend or mxspec.current_backend()))
        return run(fn, args, kwargs, backend)

    monkeypatch.setattr(mxspec.dispatch.resolve, "run", spy)
    x = torch.randn(4, 2, requires_grad=True)
    with mxspec.use_backend("reference"):
        padded, start, _ = mxspec.pad_token_groups(x, ends(1, 4), 2)
        y = mxspec.unpad_token_groups(padded, ends(1, 4), start, 4)
    y.sum().backward()
    names = ["pad_token_groups", "unpad_token_groups", "place_token_groups", "unpad_token_groups"]
    assert ran == [(name, "reference") for name in names]


@gpu
def test_nothing_waits_for_the_device():
    x, offs = random_normal(600, 64).cuda(), ends(100, 100, 590).cuda()
    wide = random_normal(600, 256).cuda()
    for backend in ("reference", "triton", "helion"):
        calls = [
            lambda b=backend: mxspec.pad_token_groups(x, offs, 32, backend=b),
            lambda b=backend: mxspec.unpad_token_groups(x, offs, offs - offs[:1], 500, backend=b),
            lambda b=backend: mxspec.place_token_groups(x, offs, offs - offs[:1], 700, backend=b),
            lambda b=backend: mxspec.to_blocked_m_groups(x.view(torch.uint8), offs, backend=b),
            lambda b=backend: mxspec.to_blocked_k_groups(x.view(torch.uint8).mT, offs, backend=b),
            lambda b=backend: mxspec.mx_quantize_groups(x, offs, backend=b),
            lambda b=backend: mxspec.mx_quantize_groups(x, offs, axis=-2, backend=b),
            lambda b=backend: mxspec.fp8_quantize_k_groups(x, offs, backend=b),
            lambda b=backend: mxspec.fp8_quantize_rowcol_groups(wide, offs, backend=b),
            lambda b=backend: mxspec.swiglu_fp8_quantize_rowcol_groups(wide, offs, backend=b),
        ]
        for call in calls:
            call()  # the first calls compile, and may wait
            torch.cuda.set_sync_debug_mode("error")
            try:
                call()
            finally:
                torch.cuda.set_sync_debug_mode("default")


@gpu
@pytest.mark.parametrize("backend", ["triton", "helion"])
def test_a_graph_follows_offsets_that_change(backend):
    x, offs = random_normal(600, 64).cuda(), ends(100, 100, 590).cuda()
    mxspec.pad_token_groups(x, offs, 32, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = mxspec.pad_token_groups(x, offs, 32, backend=backend)
    for changed in ((100, 100, 590), (0, 1, 600), (5, 5, 5)):
        offs.copy_(ends(*changed))
        graph.replay()
        expected = mxspec.pad_token_groups(x.cpu(), ends(*changed), 32)
        assert all(g.cpu().equal(e) for g, e in zip(got, expected, strict=True))
