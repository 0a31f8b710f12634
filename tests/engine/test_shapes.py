"""The sets of shapes at which an op is timed. The op's contract allows every shape, and the offs of every case."""

import inspect
import json
from functools import reduce

import pytest
from torch import Tensor

from mxspec import dispatch
from mxspec.bench import model
from mxspec.shapes import SETS, Shapes


def test_a_union_holds_each_shape_once_in_order():
    a = Shapes(matrices=((1, 32), (2, 32)))
    b = Shapes(matrices=((2, 32), (3, 32)), padding=((16, 32, 2),))
    assert a | b == Shapes(matrices=((1, 32), (2, 32), (3, 32)), padding=((16, 32, 2),))


def test_a_file_gives_its_kinds(tmp_path):
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps({"matrices": [[8192, 2048]], "grouped": [[512, 2048, 7168, 8]]}))
    assert Shapes.read(path) == Shapes(matrices=((8192, 2048),), grouped=((512, 2048, 7168, 8),))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "Expecting property name"),
        ("[]", "holds list; needs an object with shapes of some of matrices, experts, padding, linear, grouped"),
        ("{}", "holds []; needs"),
        ('{"matrices": []}', "holds ['matrices']; needs"),
        ("[" * 100_000, "recursion"),
        ('{"matrices": [[1000000000000000000000, 32]]}', "integers from 1 to 2^40"),
        ('{"matrix": [[1, 2]]}', "holds ['matrix']; needs"),
        ('{"matrices": [[1, 2, 3]]}', "matrices = [[1, 2, 3]]; needs a list of [M K], integers from 1 to 2^40"),
        ('{"matrices": [1]}', "matrices = [1]; needs"),
        ('{"linear": [[1, 0, 3]]}', "linear = [[1, 0, 3]]; needs a list of [M N K]"),
        ('{"linear": [[1, true, 3]]}', "needs a list of [M N K]"),
        ('{"linear": [[1, 2.0, 3]]}', "needs a list of [M N K]"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, text, words):
    path = tmp_path / "shapes.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="shapes: ") as error:
        Shapes.read(path)
    assert words in str(error.value)
    assert str(path) in str(error.value)


def test_torchaos_quantizer_shapes_are_those_of_its_benchmark():
    """The shapes of benchmarks/prototype/moe_training/mxfp8/bench_cutedsl_quantize_2d_1x32.py, and 32768 x 32768."""
    assert SETS["torchao"].matrices == (
        (8192, 2048),
        (8192, 7168),
        (32768, 2048),
        (32768, 7168),
        (131072, 2048),
        (131072, 7168),
        (32768, 32768),
    )


WHOLE = {"torchao": SETS["torchao"], "small": SETS["small"], "all": reduce(Shapes.__or__, SETS.values())}


@pytest.mark.turns(6)
@pytest.mark.parametrize("shapes", WHOLE)  # the set `groups` has no shape for most ops
@pytest.mark.parametrize("op", dispatch.ops())
def test_every_op_is_timed_on_calls_that_its_contract_allows(op, shapes):
    reference = dispatch.reference(op)
    cases = list(reference.spec.bench_cases(WHOLE[shapes]))
    assert cases or shapes != "all"  # only one set has shapes of weight gradients
    assert len({case.name for case in cases}) == len(cases)
    every = {case.name for case in reference.spec.bench_cases(WHOLE["all"])}
    for case in cases if shapes == "all" else [case for case in cases if case.name not in every]:
        cost = model.cost(reference, case)  # the reference checks its arguments
        assert cost.bytes_moved > 0
        assert cost.flops >= 0


def test_the_cost_of_a_case_leaves_its_tensors_real():
    reference = dispatch.reference("nvfp4_gemm")
    case = next(case for case in reference.spec.cases() if not case.flags)
    for _ in range(2):
        model.cost(reference, case)
        assert all(type(arg) is Tensor for arg in case.args())


def _reads_offs(op: str) -> bool:
    return "check_offs" in inspect.signature(dispatch.reference(op)).parameters


@pytest.mark.turns(6)
@pytest.mark.parametrize("op", [op for op in dispatch.ops() if _reads_offs(op)])
def test_every_valid_case_has_offs_that_its_contract_allows(op):
    spec = dispatch.reference(op).spec
    for case in spec.cases():
        if not case.raises:
            spec.check_args(*case.args(), **{**case.kwargs, "check_offs": True})
