"""A covering is a subset of the cases. It shows each option and each pair of options that the cases show."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mxspec import dispatch
from mxspec.machine_code.covering import Launch, covering, recorded
from mxspec.machine_code.fake_gpu import fake_gpu, unavailable
from mxspec.machine_code.planner import calls, is_edge, is_searched, plan


def launch(kernel="kernel", numbers=(), **options):
    return Launch(kernel, frozenset(options.items()), frozenset(numbers))


def test_four_of_eight_show_every_pair_of_three_options():
    product = [[launch(a=a, b=b, c=c)] for a, b, c in itertools.product((0, 1), repeat=3)]
    assert covering(product) == {0, 3, 5, 6}
    assert covering(product, together=1) == {0, 7}
    assert covering(product, together=3) == set(range(8))
    assert covering(product, together=0) == {0}


def test_every_kernel_and_every_number_counts():
    aligned, odd = ("x", True), ("x", False)
    assert covering([[launch("f", a=1)], [], [launch("g", a=1)]]) == {0, 2}
    assert covering([[launch(numbers=[aligned])], [launch(numbers=[aligned])], [launch(numbers=[odd])]]) == {0, 2}
    assert covering([[launch(numbers=[aligned])], [launch(numbers=[odd])]], together=1) == {0}  # it has no options
    assert covering([[launch(a=1)], [launch(a=2)], [launch(a=1), launch(a=2)]]) == {2}


def test_a_case_that_the_others_make_superfluous_is_dropped():
    cases = [[launch(a=1, b=1, c=1, d=1)], [launch(a=1, b=1, e=1)], [launch(c=1, d=1, f=1)]]
    assert covering(cases, together=1) == {1, 2}


@given(st.lists(st.lists(st.tuples(*3 * [st.integers(0, 2)]), max_size=2), max_size=12), st.integers(1, 2))
def test_nothing_that_any_case_shows_is_left_out(values, together):
    cases = [[launch("fg"[a % 2], a=a, b=b, c=c) for a, b, c in case] for case in values]

    def shown(chosen):
        return {s for i in chosen for one in cases[i] for s in one.shows(together)}

    enough = covering(cases, together)
    assert shown(enough) == shown(range(len(cases)))


@pytest.mark.skipif(bool(unavailable()), reason=str(unavailable()))
@pytest.mark.parametrize("backend", ["triton", "helion"])
def test_what_a_launch_depends_on_is_seen_without_compiling(backend):
    if backend == "helion":
        pytest.importorskip("helion")
        from mxspec.helion_kernels.mx_quantize import mx_quantize
    else:
        from mxspec.triton_kernels.mx_quantize import mx_quantize

    def seen(*shape, dtype=torch.bfloat16, **kwargs):
        with fake_gpu("sm90") as compiled, recorded() as launches:
            mx_quantize(torch.empty(shape, dtype=dtype, device="meta"), **kwargs)
        assert not compiled
        (one,) = launches
        return one

    one = seen(64, 64)
    assert seen(64, 64) == one
    assert seen(640, 64).options == one.options
    for other in (seen(64, 64, dtype=torch.float32), seen(64, 64, scaling="floor")):
        assert other.options - one.options
    assert seen(77, 96, scale_layout="blocked").numbers != seen(80, 96, scale_layout="blocked").numbers


SHARING = ("mx_quantize", "mx_quantize_groups", "mx_quantize_rowcol")


def shown(names, together):
    """All that the cases show of each kernel, all that the searched cases show, and the kernels of each op."""
    every, searched, of_op = set(), set(), set()
    with fake_gpu("sm90"):
        for op in SHARING:
            module = dispatch.kernel_module(op, "triton")
            for call in calls(op, module, names and names[op], generated=False):
                with recorded() as launches:
                    getattr(module, op)(*call.args, **call.kwargs) if not call.skipped else None
                new = set().union(*(one.shows(together) for one in launches))
                every |= new
                searched |= new if is_searched(call.args, is_edge(call.case)) else set()
                of_op |= {(op, one.kernel) for one in launches}
    return every, searched, of_op


@pytest.mark.skipif(bool(unavailable()), reason=str(unavailable()))
@pytest.mark.parametrize("together", [1, 2])
def test_ops_that_share_a_kernel_show_together_what_all_their_cases_show(together):
    names = plan(SHARING, "triton", "sm90", together)
    assert shown(names, together) == shown(None, together)
    alone = {op: plan((op,), "triton", "sm90", together)[op] for op in SHARING}
    assert sum(map(len, names.values())) < sum(map(len, alone.values()))
    assert all(names.values())


@pytest.mark.skipif(bool(unavailable()), reason=str(unavailable()))
def test_one_op_by_itself_is_covered_by_less_than_half_of_its_cases():
    module = dispatch.kernel_module("mx_dequantize", "triton")
    with fake_gpu("sm90"):
        every = [call for call in calls("mx_dequantize", module, generated=False) if not call.skipped]
    assert len(plan(("mx_dequantize",), "triton", "sm90", 2)["mx_dequantize"]) < len(every) / 2
