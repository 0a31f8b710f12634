"""A covering leaves out no option, and no two options that meet."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mxspec.machine_code.covering import Launch, covering, recorded
from mxspec.machine_code.fake_gpu import fake_gpu, unavailable
from mxspec.machine_code.planner import calls, covered, is_edge, is_searched


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


@pytest.mark.skipif(bool(unavailable()), reason=str(unavailable()))
@pytest.mark.parametrize("together", [1, 2])
def test_options_whose_instructions_are_searched_are_covered_by_cases_that_are_searched(together):
    from mxspec.triton_kernels import mx_dequantize as module

    def shown(some):
        found = set()
        for call in some:
            if not call.skipped and is_searched(call.args, is_edge(call.case)):
                with recorded() as launches:
                    module.mx_dequantize(*call.args, **call.kwargs)
                found |= set().union(*(one.shows(together) for one in launches))
        return found

    with fake_gpu("sm90"):
        every = calls("mx_dequantize", module, generated=False)
        enough = covered(every, module.mx_dequantize, together)
        assert sum(not call.skipped for call in enough) < sum(not call.skipped for call in every) / 2
        assert shown(enough) == shown(every) != set()
