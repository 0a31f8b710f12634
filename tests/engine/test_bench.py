"""The benchmarks: the calls that they refuse, the stored runs, the tables and the published page."""

import dataclasses
import itertools
import json
import math
import re
import statistics

import pytest
import torch

from mxspec import devices, dispatch
from mxspec.bench import cli, measure, model, moe, plots, tables, timing
from mxspec.bench.record import Entry, Race, Run, Step, read
from mxspec.bench.timing import Contender, Pace, baselines, bytes_of_call, input_sets, race
from mxspec.cases.fp8_gemm_ import onto
from mxspec.shapes import SETS, Shapes
from mxspec.spec import Case, given
from tests.helpers import ROOT, module_of

CPU = torch.device("cpu")
DEVICE = torch.device("cuda") if torch.cuda.is_available() else CPU
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


results = module_of(ROOT / "benchmarks" / "results.py")


def entry(name, us, kind="backend", moved=1000, flops=0, **more):
    return Entry(name, kind, us, us + 10, 0.001, moved, flops, **more)


def a_run(**more) -> Run:
    quantizer = Race(
        "mx_quantize",
        "64x64, rceil, plain",
        (entry("triton", 1.0), entry("copy", 2.0, "baseline"), entry("bare cast", 0.5, "baseline", moved=800)),
        absent={"helion": "is on holiday"},
    )
    matmul = Race(
        "fp8_gemm",
        "8192x8192x8192",
        (
            entry("triton", 800.0, moved=2**28, flops=2 * 8192**3, operands="fp8"),
            entry("DeepGEMM", 1000.0, "peer", 2**28, 2 * 8192**3, operands="fp8", bytes_differ="50.1 dB"),
        ),
    )
    rates = {"copy_gbps": 4000.0, "cast_gbps": 4100.0, "bf16_tflops": 700.0}
    given = {"device": "NVIDIA H200", "date": "2026-01-02", "command": "python -m mxspec bench --complete"}
    return Run(**{**given, "versions": {"torch": "2.11.0"}, "machine": rates, "races": (quantizer, matmul), **more})


# --- timing -----------------------------------------------------------------------------------------------------


def x_of(*shape):
    return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE)


def test_the_rounds_of_a_race_go_forward_and_back():
    contenders, order = [Contender(name, lambda x: x + x, [(x_of(8),)]) for name in "abc"], []
    for c in contenders:
        c.round = lambda c=c: order.append(c.name) or 1.0
    race(contenders, Pace(0, 1, 1, rounds=3))
    assert "".join(order) == "abccbaabc"


def test_a_race_times_every_contender_of_the_same_inputs():
    inputs = [(x_of(64, 256),), (x_of(64, 256),)]
    contenders = [Contender("double", lambda x: x + x, inputs), *baselines(inputs)]
    race(contenders)
    assert [c.name for c in contenders] == ["double", "bare cast", "copy"]
    for c in contenders:
        assert 0 < c.us < 1e6
        assert 0 < c.call_us < 1e6
        assert c.spread >= 0
    double, cast, copy = (bytes_of_call(c) for c in contenders)
    assert (double, cast, copy) == (65536, 49152, 65536)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32])
def test_the_copy_is_a_copy(dtype):
    x = torch.arange(60, device=DEVICE).to(dtype).view(5, 12)  # fewer bytes than one program copies
    *_, copy = baselines([(x,)])
    assert copy.name == "copy"
    copy.replay()
    assert copy.outputs[0][0].view(torch.uint8).equal(x.view(torch.uint8))


TO_BLOCKED = dispatch.reference("to_blocked")


class Replayed:
    """A CUDA graph on the CPU: a replay writes into the outputs of the capture."""

    def __init__(self, contender):
        self.contender = contender

    def replay(self):
        for outputs, args in zip(self.contender.outputs, self.contender.inputs, strict=True):
            self.contender.launch(outputs, *args)


def captured(launch, call, *inputs):
    """A contender whose replays call `launch(outputs, *args)`, as a captured kernel writes into the same outputs."""
    contender = Contender("mine", call, list(inputs))
    contender.launch, contender.graph = launch, Replayed(contender)
    return contender


def scales(seed=0):
    return (torch.randint(0, 255, (128, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)),)


def test_what_is_right_may_be_timed():
    inputs = [scales(0), scales(1)]
    expected = [(TO_BLOCKED(*args),) for args in inputs]
    right = captured(lambda outs, s: outs[0].copy_(TO_BLOCKED(s)), TO_BLOCKED, *inputs)
    assert right.prove(expected) is None
    assert right.prove_again(expected) is None
    assert right.prove(None) is None


def test_wrong_bytes_are_found():
    expected = [(TO_BLOCKED(*scales()),)]
    wrong = captured(lambda outs, s: outs[0].copy_(s.flatten()), lambda s: s.flatten().clone(), scales())
    assert "elements differ" in wrong.prove(expected)


def test_a_launch_that_skips_part_of_its_output_is_found():
    """The reason for poison: the skipped half would be right, because it was right before."""
    expected = [(TO_BLOCKED(*scales()),)]
    half = captured(lambda outs, s: outs[0][:256].copy_(TO_BLOCKED(s)[:256]), TO_BLOCKED, scales())
    assert "elements differ" in half.prove(expected)
    assert half.prove(None) == "256 bytes of its outputs depend on what was there before"


def test_what_is_skipped_where_the_right_byte_is_the_poison_is_found():
    """0xFF is a NaN of e4m3fn, and all NaN codes compare as equal. So a second poison is needed."""
    x = (torch.full((4, 32), torch.nan),)
    quantize = dispatch.reference("mx_quantize")
    nothing = captured(lambda outs, x: None, quantize, x)
    assert "elements differ" in nothing.prove([quantize(*x)])


def test_an_output_in_an_input_is_no_proof():
    args = scales()
    alias = captured(lambda outs, s: None, lambda s: s.view(-1), args)
    assert "share memory with its inputs" in alias.prove([(args[0].flatten().clone(),)])
    out = torch.zeros(512, dtype=torch.uint8)
    shared = captured(lambda outs, s: outs[0].copy_(TO_BLOCKED(s)), lambda s: out, scales(0), scales(0))
    assert "or with the outputs of another call" in shared.prove([(TO_BLOCKED(*scales()),)] * 2)


def test_changed_inputs_are_found():
    seven = (torch.full((512,), 7, dtype=torch.uint8),)

    def spoil(outs, s):
        outs[0].fill_(7)
        s.fill_(8)

    spoiling = captured(spoil, lambda s: s * 0 + 7, (torch.zeros(512, dtype=torch.uint8),))
    assert spoiling.prove([seven]) == "it changes its inputs"


def test_a_plain_call_is_proven_too():
    calls = []

    def right_at_first(s):
        calls.append(s)
        return TO_BLOCKED(s) if len(calls) < 3 else TO_BLOCKED(s) ^ 1

    later = captured(lambda outs, s: outs[0].copy_(TO_BLOCKED(s)), right_at_first, scales())
    assert later.prove([(TO_BLOCKED(*scales()),)]).startswith("called plainly: output 0: 512 of 512 elements differ")


# --- an op that changes its argument


IN_PLACE = dispatch.reference("fp8_gemm_")


def in_place(call, launch=None):
    """A contender that adds in place on two sets of inputs, and the right results."""
    inputs = [onto(8, 16, 128), onto(8, 16, 256)]
    inputs = [tuple(t.to(DEVICE) for t in args) for args in inputs]
    expected = [IN_PLACE.spec.outputs(own, IN_PLACE(*own)) for own in map(IN_PLACE.spec.own, inputs)]
    contender = Contender("mine", call, inputs, spec=IN_PLACE.spec)
    if launch:
        contender.launch, contender.graph = (lambda outs, *args: launch(*args)), Replayed(contender)
    return contender, expected


@pytest.mark.parametrize("launch", [None, IN_PLACE])
def test_what_adds_in_place_may_be_timed(launch):
    contender, expected = in_place(IN_PLACE, launch)
    kept = [args[0].clone() for args in contender.given]
    assert contender.prove(expected, IN_PLACE.spec.min_sqnr_db) is None
    race([contender])
    assert contender.prove_again(expected, IN_PLACE.spec.min_sqnr_db) is None
    assert contender.prove(None) is None
    assert contender.calls == 2
    assert bytes_of_call(contender) == 8 * 128 + 16 * 128 + (8 + 1) * 4 + 2 * 8 * 16 * 4
    assert all(args[0].equal(before) for args, before in zip(contender.given, kept, strict=True))


def adds_and_spoils(acc, a, a_scale, b, b_scale):
    IN_PLACE(acc, a, a_scale, b, b_scale)
    a_scale.add_(2**-20)


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        (lambda *args: None, "dB; needs"),
        (lambda *args: [IN_PLACE(*args) for _ in range(2)], "dB; needs"),
        (lambda acc, *args: acc.copy_(dispatch.reference("fp8_gemm")(*args)), "dB; needs"),
        (lambda acc, *args: IN_PLACE(acc[:4], args[0][:4], args[1][:4], *args[2:]), "dB; needs"),
        (adds_and_spoils, "it changes its inputs"),
    ],
)
def test_a_launch_that_adds_wrongly_is_found(launch, words):
    contender, expected = in_place(IN_PLACE, launch)
    assert words in contender.prove(expected, IN_PLACE.spec.min_sqnr_db)


def test_a_launch_that_stops_adding_while_it_is_timed_is_found():
    contender, expected = in_place(IN_PLACE, IN_PLACE)
    assert contender.prove(expected, IN_PLACE.spec.min_sqnr_db) is None
    contender.launch = lambda outs, *args: None
    assert "dB; needs" in contender.prove_again(expected, IN_PLACE.spec.min_sqnr_db)


def test_in_place_the_rate_is_of_fp8_operands():
    (case,) = IN_PLACE.spec.bench_cases(Shapes(wgrad=((128, 128, 256),)))
    found = measure.measure(IN_PLACE, case, ["reference"], CPU)
    (mine,) = [e for e in found.entries if e.kind == "backend"]
    assert (mine.operands, mine.flops) == ("fp8", 2 * 128 * 128 * 256)
    assert mine.bytes_moved == 2 * 128 * 256 + 2 * 128 * 2 * 4 + 2 * 128 * 128 * 4


@needs_gpu
def test_on_the_gpu_the_graph_itself_is_proven():
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)

    def half(x):
        out = torch.empty_like(x)
        out[:32].copy_(x[:32])
        return out

    contender = Contender("half", half, [(x,)])
    assert "elements differ" in contender.prove([(x.clone(),)])
    left = contender.calls * 32 * 256 * 2
    assert contender.prove(None) == f"{left} bytes of its outputs depend on what was there before"
    assert Contender("whole", lambda x: x + 0, [(x,)]).prove([(x.clone(),)]) is None


def test_the_yardsticks_are_proven(monkeypatch):
    monkeypatch.setattr(timing, "copy", lambda x: torch.zeros_like(x))
    with pytest.raises(AssertionError, match="the baseline is wrong: output 0: "):
        baselines([(x_of(4, 32),)])


def test_a_wrong_yardstick_loses_no_other_figure(monkeypatch):
    monkeypatch.setattr(timing, "copy", lambda x: torch.zeros_like(x))
    found = measure.measure(TO_BLOCKED, the_case(), ["reference"], CPU)
    assert [e.name for e in found.entries] == ["reference"]
    assert found.wrong["baselines"].startswith("the baseline is wrong: output 0: ")


@pytest.mark.parametrize("value", [1.0, 465.0, -1e30, math.inf])
def test_the_bare_cast_saturates(value):
    """As Hopper's conversion does. So values of any size can be timed beside it."""
    x = torch.full((4, 32), value, dtype=torch.bfloat16, device=DEVICE)
    cast = baselines([(x,)])[0]
    assert cast.name == "bare cast"
    cast.replay()
    assert cast.outputs[0][0].float().eq(max(-448.0, min(value, 448.0))).all()


def test_the_parts_of_a_complete_run_are_all_ops_once():
    parts = [cli.ops_of(cli.parser().parse_args(["--complete", part])) for part in cli.PARTS]
    assert all(parts)
    assert sorted(itertools.chain(*parts)) == sorted(dispatch.ops())
    assert sorted(cli.ops_of(cli.parser().parse_args(["--complete"]))) == sorted(dispatch.ops())


@needs_gpu
def test_inputs_rotate_past_the_l2():
    reference = dispatch.reference("mx_quantize")
    case = Case("", given(torch.randn, 2048, 2048, dtype=torch.bfloat16))
    sets = input_sets(reference, case, DEVICE)
    moved = 2048 * 2048 * 3 + 2048 * 64
    assert (len(sets) - 1) * moved < 4 * torch.cuda.get_device_properties(0).L2_cache_size <= len(sets) * moved
    assert len({args[0].data_ptr() for args in sets}) == len(sets)
    tiny = Case("", given(torch.randn, 1, 32, dtype=torch.bfloat16))
    assert len(input_sets(reference, tiny, DEVICE)) == 32


# --- measuring --------------------------------------------------------------------------------------------------


def the_case():
    return next(iter(TO_BLOCKED.spec.bench_cases(Shapes(matrices=((128, 128),)))))


def test_what_is_wrong_is_not_timed_and_the_exit_code_says_so(monkeypatch, capsys, tmp_path):
    (tmp_path / "s.json").write_text('{"matrices": [[128, 128]]}')
    monkeypatch.setattr(dispatch, "public", lambda op: lambda scale, backend: TO_BLOCKED(scale) ^ 1)
    monkeypatch.setattr(dispatch, "refusal", lambda *a: None)
    found = measure.measure(TO_BLOCKED, the_case(), ["triton"], DEVICE)
    assert found.entries == ()
    assert "512 of 512 elements differ" in found.wrong["triton"]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cli, "measure", lambda *a: found)
    monkeypatch.setattr(cli, "machine", lambda device: {})
    assert cli.main(["--op", "to_blocked", "--shapes", str(tmp_path / "s.json")]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "WRONG, not timed: to_blocked, triton, 128x4: output 0: 512 of 512" in said


def test_a_kernel_that_raises_is_a_finding_and_not_the_end(monkeypatch):
    def broken(scale, backend):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(dispatch, "refusal", lambda *a: None)
    monkeypatch.setattr(dispatch, "public", lambda op: broken)
    found = measure.measure(TO_BLOCKED, the_case(), ["triton"], DEVICE)
    assert found.wrong == {"triton": "raised on a valid call: no such instruction"}


def test_after_an_illegal_access_nothing_is_timed_and_what_was_timed_is_kept(monkeypatch):
    """CUDA answers each later call of the process with the same error."""
    cases = list(TO_BLOCKED.spec.bench_cases(SETS["small"]))[:4]
    before = Race("to_blocked", cases[0].name, ())
    absent = {"helion": "takes no such rows", "FBGEMM": "CUDA error: an illegal memory access", "torchao": "CUDA error"}
    found = iter([before, Race("to_blocked", cases[1].name, (), absent)])
    asked = iter(["", "CUDA error: an illegal memory access"])
    monkeypatch.setattr(cli, "measure", lambda *a: next(found))
    monkeypatch.setattr(cli, "_end_of_gpu", lambda device: next(asked))
    work = [(TO_BLOCKED, case, ["triton"]) for case in cases]
    races, not_timed, lost = cli.races_of(work, torch.device("cuda"), None)
    assert races == [before, Race("to_blocked", cases[1].name, (), {}, {"FBGEMM": absent["FBGEMM"]})]
    assert not_timed == {f"to_blocked, {case.name}": lost for case in cases[2:]}
    assert lost == f"the GPU was lost before, in to_blocked, {cases[1].name}: CUDA error: an illegal memory access"


def test_peers_are_raced_reported_different_or_absent():
    """A peer with another rule is timed. A peer that does other work, or does not support the call, is not."""

    def refuse(scale):
        raise NotImplementedError("needs compute capability 12.0\nand more")

    prepared = []
    same = lambda scale: TO_BLOCKED(scale)  # noqa: E731
    same.prepare = lambda scale: prepared.append(scale) or (scale.clone(),)

    class Peers:
        ADAPTERS = {  # noqa: RUF012
            "to_blocked": {
                "same": TO_BLOCKED,
                "prepared": same,
                "other rule": lambda scale: TO_BLOCKED(scale) ^ 1,
                "other work": lambda scale: scale.new_zeros(3),
                "too old": refuse,
            }
        }

    found = measure.measure(TO_BLOCKED, the_case(), [], DEVICE, Peers)
    differing = {e.name: bool(e.bytes_differ) for e in found.entries if e.kind == "peer"}
    assert differing == {"same": False, "other rule": True, "prepared": False}
    assert "512 of 512 elements differ" in found.entry("other rule").bytes_differ
    assert found.absent == {
        "too old": "needs compute capability 12.0",
        "other work": f"not timed: output 0: shape {torch.Size([3])}; needs {torch.Size([512])}",
    }
    assert prepared


def test_the_machines_own_rates():
    assert {name: rate > 0 for name, rate in measure.machine(DEVICE).items()} == {
        "copy_gbps": True,
        "cast_gbps": True,
        "bf16_tflops": True,
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--moe"], "--moe needs a GPU, and this machine has none"),
        (["--peers"], "--peers needs a GPU"),
        (["--complete"], "--complete needs a GPU"),
        (["--backend", "triton"], "triton needs a GPU; without one, only the references are timed"),
        (["--op", "mx_quantise"], "unknown op 'mx_quantise'; needs one of clamped_swiglu"),
        (["--model", "--op", "mx_quantise"], "unknown op 'mx_quantise'"),
        (["--shapes", "torchaoo"], "torchaoo is neither a file nor one of the sets torchao, small"),
        (["--from", "no such file"], "no such file is not a stored run"),
        (["--json", "no such folder/x.json"], "needs a file name in a folder that exists"),
        (["--json", "/"], "needs a file name"),
        (["--plot", __file__], "this is a file; needs a folder"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_timed(monkeypatch, arguments, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cli, "machine", None)
    with pytest.raises(ValueError, match=r"bench: |shapes: ") as error:
        cli.main(arguments)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--from", "run.json", "--op", "mx_quantize"],
        ["--complete", "--op", "mx_quantize"],
        ["--complete", "--shapes", "small"],
        ["--model", "--json", "x.json"],
        ["--moe", "--backend", "triton"],
    ],
)
def test_options_that_contradict_each_other_are_refused(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    assert "needs only one of them" in capsys.readouterr().err


def test_an_op_is_given_once(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["--op", "to_blocked", "--op", "mx_quantize"])
    assert "got --op twice; needs it once" in capsys.readouterr().err


def test_a_shape_that_the_contract_refuses_is_reported(tmp_path):
    (tmp_path / "s.json").write_text('{"matrices": [[4, 33], [4, 64]]}')
    options = cli.parser().parse_args(["--op", "mx_dequantize", "--shapes", str(tmp_path / "s.json")])
    work, not_timed = cli.cases_of(options, cli.shapes_of(options.shapes, ()), False, None)
    assert [case.name for _, case, _ in work] == ["4x64, plain"]
    assert list(not_timed) == ["mx_dequantize, 4x33, plain"]
    assert "qdata has 33 bytes along K" in not_timed["mx_dequantize, 4x33, plain"]


# --- the record and its tables ----------------------------------------------------------------------------------


def test_a_run_is_read_back_as_it_was_written(tmp_path):
    run = a_run(moe=(Step("L", "forward", "x @ w^T", "torch bf16", 1.0, 2, 3, True),))
    run.write(tmp_path / "run.json")
    assert read(tmp_path / "run.json") == run


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r.pop("format"), "needs an object with format 1"),
        (lambda r: r["races"][0]["entries"][0].update(us=0), "us = 0; needs a positive number"),
        (lambda r: r["races"][0]["entries"][0].update(us="fast"), "us = 'fast'; needs a positive number"),
        (lambda r: r["races"][0]["entries"][0].update(call_us=float("nan")), "call_us = nan"),
        (lambda r: r["machine"].update(copy_gbps=-1), "copy_gbps = -1"),
        (lambda r: r.update(races=None), "not iterable"),
        (lambda r: r.update(colour="red"), "colour"),
    ],
)
def test_what_is_no_stored_run_is_refused(tmp_path, change, words):
    a_run().write(tmp_path / "run.json")
    stored = json.loads((tmp_path / "run.json").read_text())
    change(stored)
    (tmp_path / "run.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=r"run\.json is not a stored run: ") as error:
        read(tmp_path / "run.json")
    assert words in str(error.value)


def test_the_tables_do_without_what_a_run_lacks():
    step = Step("L", "forward", "x", "triton", None, 2, 3, False, "its bytes")
    bare = a_run(device="NVIDIA A100", machine={}, moe=(step,))
    assert "| forward | x | triton | wrong |  |  |  |" in tables.markdown(bare)
    assert bare.wrong == ["MoE, L, forward, x: its bytes"]
    empty = a_run(races=(Race("to_blocked", "1x1", (), {"triton": "is on holiday"}),))
    assert "triton, 1 of 1 cases: is on holiday" in tables.markdown(empty)


def test_the_tables_say_what_was_measured():
    quantizer, matmul = tables.sheets(a_run())
    assert quantizer.markdown() == (
        "### mx_quantize\n\n"
        "| case | contender | us | us, plain call | GB/s | of copy | of bare cast | spread |\n"
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| 64x64, rceil, plain | triton | 1.00 | 11.0 | 1 | 2.000 | 0.625 | 0.1% |\n"
        "| 64x64, rceil, plain | copy | 2.00 | 12.0 | 0 | 1.000 | 0.312 | 0.1% |\n"
        "| 64x64, rceil, plain | bare cast | 0.50 | 10.5 | 2 | 3.200 | 1.000 | 0.1% |\n"
        "\nhelion, 1 of 1 cases: is on holiday\n"
    )
    # 2 * 8192^3 / 800 us = 1374 TFLOP/s, compared with the peak of 1979, the measured 700, and the peer's 1100
    assert matmul.header[4:] == ("TFLOP/s", "of dense peak", "of bf16 matmul", "of DeepGEMM", "spread", "bytes")
    assert matmul.rows[0][2:] == ("800.00", "810.0", "1374", "0.694", "1.963", "1.250", "0.1%", "equal")
    assert matmul.rows[1][-1] == "50.1 dB"


def test_the_heading_says_where_and_with_what():
    found = {"peers": {"FBGEMM": "absent: no such module"}, "not_timed": {"mx_dequantize": "no kernel yet"}}
    text = tables.heading(a_run(**found))
    assert "- NVIDIA H200; its data sheet: 4800 GB/s, 989 bf16 TFLOP/s" in text
    assert "- peers: FBGEMM absent: no such module" in text
    assert "- not timed: mx_dequantize: no kernel yet" in text


def test_pictures_are_drawn_of_what_there_is(tmp_path):
    races = [
        Race("mx_quantize", f"{M}x64, rceil, plain", (entry("triton", 1.0 + M, moved=100 * M, flops=M),))
        for M in (1, 2, 3)
    ]
    assert [p.name for p in plots.draw(a_run(races=tuple(races)), tmp_path)] == ["bandwidth.png", "roofline.png"]
    assert [p.name for p in plots.draw(a_run(), tmp_path)] == ["roofline.png", "matmul.png"]
    assert plots.draw(a_run(races=()), tmp_path) == []
    for path in tmp_path.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")


# --- the model --------------------------------------------------------------------------------------------------


def test_the_cost_of_a_call_needs_no_memory():
    case = Case("", given(torch.randn, 2**20, 2**15, dtype=torch.bfloat16))  # 64 GiB
    elements = 2**35
    cost = model.cost(dispatch.reference("mx_quantize"), case)
    assert cost == (elements * 3 + elements // 32, 2 * elements, False, False)


def test_the_expected_time_is_the_larger_of_two_and_a_start():
    h200 = devices.DEVICES["NVIDIA H200"]
    for cost, us in [
        (model.Cost(4_800_000_000, 0, False), 2.0 + 1e3 / 0.91),
        (model.Cost(0, 989 * 10**12, False), 2.0 + 1e6 / 0.68),
        (model.Cost(0, 1979 * 10**12, True), 2.0 + 1e6 / 0.62),
        (model.Cost(0, 989 * 10**12, True, mx=True), 2.0 + 1e6 / 0.68),  # as bf16
    ]:
        assert model.expected_us(h200, cost) == pytest.approx(us)
    mx = model.Cost(0, 4500 * 10**12, True, mx=True)
    assert model.expected_us(devices.DEVICES["NVIDIA B200"], mx) == pytest.approx(2.0 + 1e6 / 0.62)
    assert h200.is_matmul(2 * 8192**3, 3 * 2 * 8192**2)
    assert not h200.is_matmul(2 * 8192**2, 2 * 8192**2)  # one row: each weight that is read serves only two flops


def test_the_model_covers_every_op_and_the_layers_on_every_gpu():
    kinds = {"padding": ((256, 64, 256),), "linear": ((256, 256, 256),), "grouped": ((256, 256, 256, 2),)}
    ops, shapes = dispatch.ops(), Shapes(((8192, 2048),), wgrad=((256, 256, 256),), **kinds)
    sheets = list(tables.model_sheets(shapes, ops, moe.LAYERS))
    assert [s.title.split(",")[0] for s in sheets[: len(ops)]] == list(ops)
    assert len(sheets) == len(ops) + len(moe.LAYERS)
    assert all(s.header[-3:] == ("H100", "H200", "B200") for s in sheets)
    assert sheets[0].note.endswith("H100 and B200: unmeasured")
    step = sheets[-1]
    assert float(step.rows[-1][2]) == pytest.approx(sum(float(row[2]) for row in step.rows[:-1]), abs=1)


@pytest.mark.parametrize("layer", moe.LAYERS)
def test_a_grouped_linear_multiplies_each_of_its_three_tensors_twice(layer):
    assert [k.phase for k in moe.kernels(*layer)] == 3 * ["forward"] + 3 * ["dgrad"] + 3 * ["wgrad"]
    small = moe.kernels(64, 32, 96, 2)
    products = [moe.grouped_matmul(*k.args()).shape for k in small if k.op is None]
    assert products == [(64, 32), (64, 96), (2, 32, 96)]


# --- what is published ------------------------------------------------------------------------------------------

STORED = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


@pytest.fixture(scope="module")
def stored() -> Run:
    return read(results.stored(results.QUANTIZERS))


@pytest.fixture(scope="module")
def newest(stored) -> tuple[Run, Run, Run]:
    return stored, read(results.stored(results.MATMULS)), read(results.stored(results.NVFP4))


def test_the_readmes_table_is_that_of_the_newest_stored_runs(newest):
    readme = (ROOT / "README.md").read_text()
    quantizers, matmuls, _ = newest
    assert results.in_readme(quantizers, matmuls, readme) == readme, "run `python benchmarks/results.py publish RUN`"


def test_what_the_readme_claims_in_words_is_true_of_the_newest_stored_runs(newest):
    quantizers, matmuls, _ = newest
    said = (ROOT / "README.md").read_text()
    assert "at the memory's speed on an H200" in said
    assert results.shares(quantizers)["along rows"][0] > 0.985
    beside = {(race.op, race.case): race.ratio(race.entry("triton"), "cuBLAS bf16") for race in matmuls.races}
    sizes = {case: math.prod(map(int, case.split("x"))) for op, case in beside if op == "fp8_gemm" and "," not in case}
    large = [beside["fp8_gemm", case] for case, size in sizes.items() if size > 1e10]
    assert said.count("matmuls alone: 1.6 to 1.8 times") == 2
    assert 1.6 < min(large) < max(large) < 1.82
    races = {(race.op, race.case): race for race in matmuls.races}
    wgrad = races["fp8_grouped_gemm_wgrad", "32768x8192x5120, E 1, even, padded, bfloat16"]
    assert "wgrad 1.25 " in said
    assert wgrad.ratio(wgrad.entry("triton"), "torch bf16") == pytest.approx(1.25, abs=0.01)


def test_the_summary_is_that_of_the_newest_stored_runs(newest):
    assert results.SUMMARY.read_text() == results.summary(*newest)


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_a_results_page_is_written_from_its_json(path):
    run = read(path)
    assert path.stem == results.name_of(run)
    assert path.with_suffix(".md").read_text() == results.page(run)
    linked = re.findall(r"!\[\w+\]\((.*?)\)", results.page(run))
    assert linked
    assert all((path.parent / picture).exists() for picture in linked)


def test_the_stored_runs_are_complete_and_steady(stored, newest):
    assert {run.command.removeprefix(results.COMPLETE).strip() for run in newest} <= {"", *cli.PARTS}
    assert max(run.seconds for run in newest) < 16 * 60
    races = [race for run in newest for race in run.races]
    assert not any(race.wrong for race in races)
    timed = {race.op for race in races if any(e.kind == "backend" for e in race.entries)}
    modules = {op: [dispatch.kernel_module(op, b) for b in dispatch.backends()] for op in dispatch.ops()}
    ranked = {op for op, kernels in modules.items() if any(hasattr(kernel, "RANK") for kernel in kernels)}
    # A kernel without a rank has not run on a GPU yet. An op that is newer than the stored run is in the next run.
    known = timed | {what.partition(",")[0] for run in newest for what in run.not_timed}
    assert timed >= ranked & known >= {"mx_quantize", "to_blocked"}
    assert {step.layer for step in stored.moe} == set(map(moe.label, moe.LAYERS))
    spreads: dict[bool, list[float]] = {}
    for timed_case in races:
        large = [e.spread for e in timed_case.entries if e.kind == "backend" and e.us > 100]
        spreads.setdefault(timed_case.is_matmul(stored.device), []).extend(large)
    assert max(spreads[False]) < 0.03
    # At its power limit the card steps between two clocks. After a contender that needs less power, it starts high.
    assert statistics.median(spreads[True]) < 0.02
    assert max(spreads[True]) < 0.13


def test_the_model_is_within_15_percent_of_the_h200_where_it_says_so(stored):
    """Compares quantizers that move more than 100 MB, the best FP8 matmul of 8192^3, and its bf16 matmul."""
    h200, errors = devices.DEVICES[stored.device], {}
    for case in stored.races:
        for e in case.entries:
            ours = case.op.startswith("mx_quantize") and e.kind == "backend" and e.bytes_moved > 100e6
            best = case.case == "8192x8192x8192" and e.name in ("DeepGEMM", "cuBLAS bf16")
            if (ours and e.name == "triton" and "rowcol" not in case.op) or best:
                cost = model.Cost(e.bytes_moved, e.flops, e.operands == "fp8")
                errors[case.case, e.name] = abs(e.us / model.expected_us(h200, cost) - 1)
    for step in stored.moe:
        if step.backend != "reference" and step.bytes_moved > 100e6:
            cost = model.Cost(step.bytes_moved, step.flops, fp8=False)
            errors[step.layer, step.what] = abs(step.us / model.expected_us(h200, cost) - 1)
    assert len(errors) > 25
    assert max(errors.values()) < 0.15, max(errors, key=errors.get)


def test_compare_finds_what_fell_by_more_than_5_percent_and_what_is_gone(stored, tmp_path, capsys):
    assert list(results.falls(stored, stored)) == []
    first = next(case for case in stored.races if case.op == "mx_quantize")
    others = tuple(case for case in stored.races if case != first)

    def with_first(entries):
        return dataclasses.replace(stored, races=(dataclasses.replace(first, entries=tuple(entries)), *others))

    slow = [dataclasses.replace(e, us=e.us * 1.06) if e.name == "triton" else e for e in first.entries]
    fell = list(results.falls(with_first(slow), stored))
    assert len(fell) == sum(e.kind != "backend" for e in first.entries)
    assert all(line.startswith(f"{first.op}, {first.case}, triton: ") for line in fell)
    alone = [e for e in first.entries if e.name != "copy"]
    assert any(line.endswith("no copy beside it any more") for line in results.falls(with_first(alone), stored))
    gone = dataclasses.replace(stored, races=others)
    assert any(line.endswith("no figure any more") for line in results.falls(gone, stored))
    gone.write(tmp_path / "gone.json")
    assert results.main(["compare", str(tmp_path / "gone.json")]) == 1
    assert "gone or fallen by more than 5% since the newest stored runs, 2026-" in capsys.readouterr().out
    dataclasses.replace(stored, device="NVIDIA A100").write(tmp_path / "other.json")
    assert results.main(["compare", str(tmp_path / "other.json"), str(tmp_path / "gone.json")]) == 2
    assert "needs one device" in capsys.readouterr().err


def test_only_a_complete_right_run_is_published(stored, tmp_path, capsys):
    before = {path: path.read_bytes() for path in (ROOT / "benchmarks" / "results").glob("*.*")}
    quantizers = [race for race in stored.races if race.op == "mx_quantize"]
    spoiled = (dataclasses.replace(stored.races[0], wrong={"triton": "no"}), *stored.races[1:])
    for change, words in [
        (
            {"command": "python -m mxspec bench --op mx_quantize --complete"},
            "needs a run of `python -m mxspec",
        ),
        ({"races": spoiled}, "found something wrong"),
        ({"races": ()}, "has timed none of mx_quantize, fp8_gemm, nvfp4_quantize; needs at least one"),
        (
            {"races": (stored.races[0], *quantizers[:1])},
            "has no figure for ('mx_quantize', '32768x7168, rceil, blocked')",
        ),
    ]:
        dataclasses.replace(stored, **change).write(tmp_path / "run.json")
        assert results.main(["publish", str(tmp_path / "run.json")]) == 2
        assert words in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in (ROOT / "benchmarks" / "results").glob("*.*")}


def test_the_readme_needs_one_place_for_its_table():
    with pytest.raises(ValueError, match="one place"):
        results.in_readme(a_run(), a_run(), "no place")
