"""The published vectors: a program without torch reads them and answers; every kind of wrong answer is found."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

from mxspec import dispatch, rules, vectors
from mxspec.__main__ import main
from mxspec.formats import ELEMENTS, SCALINGS
from tests.helpers import ROOT


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vectors")
    return folder, vectors.export(folder)


@pytest.fixture
def answered(tmp_path):
    """Vectors of mx_quantize with the right answers: the manifest, and functions that change the answers."""
    manifest = vectors.export(tmp_path, ["mx_quantize"])["mx_quantize"]
    stored = load_file(tmp_path / "mx_quantize.safetensors")
    results = tmp_path / "results"
    results.mkdir()
    tests = manifest["tests"]
    outputs = {f"{t['id']}.{o['name']}": stored[o["stored"]].clone() for t in tests for o in t.get("outputs", ())}
    said = {"rejected": {str(t["id"]): "no" for t in tests if t["result"] == "invalid"}}

    def judged():
        save_file(outputs, results / "mx_quantize.safetensors")
        (results / "mx_quantize.json").write_text(json.dumps(said))
        return {r.case: r for r in vectors.check(tmp_path)}

    return types.SimpleNamespace(folder=tmp_path, tests=tests, outputs=outputs, said=said, judged=judged)


def number(answered, name):
    return next(str(t["id"]) for t in answered.tests if t["comment"] == name)


# --- what is written --------------------------------------------------------------------------------------------


@pytest.mark.turns(3)
def test_every_op_that_is_judged_byte_for_byte_has_vectors(published):
    folder, manifests = published
    assert "fp8_gemm" not in manifests
    assert {"mx_quantize", "fp8_quantize_1x128", "mx_dequantize", "to_blocked", "pad_token_groups"} <= set(manifests)
    for op, manifest in manifests.items():
        cases = {c.name: c for c in dispatch.reference(op).spec.cases()}
        tests, left_out = manifest["tests"], manifest["left_out"]
        assert [t["comment"] for t in tests] + [c["comment"] for c in left_out] != []
        assert {t["comment"] for t in tests} | {c["comment"] for c in left_out} == set(cases)
        for c in left_out:  # only calls that bytes cannot express, and calls that are too large, are left out
            too_much = "large" in c["flags"] or "a file holds tests of" in c["because"]
            assert too_much or "invalid" in c["flags"], (op, c)
        assert sum(bool(t["flags"]) for t in tests) * 4 >= len(tests), op
        assert all((t["result"] == "invalid") == ("invalid" in t["flags"]) for t in tests)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 7.8e6 * len(manifests)


def accepts(op, option, value):
    """Whether an op takes a value of an option, whatever its other arguments."""
    spec = dispatch.reference(op).spec
    for case in (c for c in spec.cases() if not c.flags):
        try:
            spec.check_args(*case.args(), **{**case.kwargs, option: value})
        except (TypeError, ValueError):
            continue
        return True
    return False


def test_every_scaling_and_element_format_that_an_op_takes_is_there(published):
    _, manifests = published
    for op, manifest in manifests.items():
        options = [t["options"] for t in manifest["tests"] if t["result"] == "valid"]
        if "scaling" in options[0]:
            assert {o["scaling"] for o in options} == set(SCALINGS), op
        if "elem_dtype" in options[0]:
            formats = [fmt.dtype or fmt.name for fmt in ELEMENTS.values()]
            taken = {str(fmt).removeprefix("torch.") for fmt in formats if accepts(op, "elem_dtype", fmt)}
            assert len(taken) > 1
            assert {o["elem_dtype"] for o in options} - {None} == taken, op
            assert taken <= set(manifest["formats"]), op


# The digest that a release has published under vectors.VERSION, or that the next release will publish. If it changes, a
# test or its bytes changed: pin the new digest, and raise VERSION if a release has the old digest. It was computed with
# torch 2.13 and safetensors 0.8, with and without vector instructions. If another release of either gives other bytes,
# `export` breaks its promise; find the reason first.
PUBLISHED = (3, "2c7441230f400ac08b46ad763bbe29338d5185c0a4978dd368dbb828b6f0958e")


def test_what_is_published_under_a_version_stays(published):
    _, manifests = published
    content = {op: (manifest["sha256"], manifest["tests"]) for op, manifest in manifests.items()}
    assert {manifest["version"] for manifest in manifests.values()} == {vectors.VERSION}
    assert (vectors.VERSION, hashlib.sha256(json.dumps(content).encode()).hexdigest()) == PUBLISHED


def test_outputs_without_names_are_said_to_lack_them(monkeypatch):
    nameless = types.SimpleNamespace(__doc__="Does.\n\nReturns:\n    Codes and scales.\n")
    monkeypatch.setattr(dispatch, "reference", lambda op: nameless)
    with pytest.raises(ValueError, match=r"docstring of my_op names no 2 outputs; needs `\(name, name, \.\.\.\)`"):
        vectors.output_names("my_op", 2)


def test_the_header_counts_the_numbers_of_f4(published):
    """As FORMAT says, read without torch."""
    folder, manifests = published
    data = (folder / "mx_quantize.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    outputs = {t["comment"]: t["outputs"][0] for t in manifests["mx_quantize"]["tests"] if "outputs" in t}
    rows = outputs["every code and tie, e2m1"]
    assert (rows["shape"], header[rows["stored"]]["dtype"], header[rows["stored"]]["shape"]) == ([2, 16], "F4", [2, 32])


def test_golden_how_a_column_major_output_is_stored(published):
    folder, manifests = published
    [test] = [t for t in manifests["mx_quantize"]["tests"] if t["comment"] == "2x96x160, axis -2, plain"]
    [qdata, _] = test["outputs"]
    assert (qdata["shape"], qdata["strides"]) == ([2, 96, 160], [15360, 1, 96])
    assert load_file(folder / "mx_quantize.safetensors")[qdata["stored"]].shape == (2, 160, 96)


def test_golden_a_test_of_an_argument_without_a_tensor(published):
    _, manifests = published
    [test] = [t for t in manifests["from_blocked"]["tests"] if t["comment"] == "wrong size"]
    assert test == {
        "id": 10,
        "comment": "wrong size",
        "flags": ["invalid"],
        "inputs": [
            {"name": "blocked", "dtype": "uint8", "shape": [512], "strides": [1], "stored": "10.blocked"},
            {"name": "rows", "value": 129},
            {"name": "cols", "value": 4},
        ],
        "options": {},
        "result": "invalid",
        "error": {"type": "ValueError", "message": "1024"},
    }


def test_a_nan_that_is_computed_is_positive_and_one_that_is_moved_stays(published):
    """The sign of a computed NaN depends on the CPU and on the order of the operands."""
    folder, manifests = published
    negative = {}
    for op in ("mx_dequantize", "pad_token_groups"):
        stored = load_file(folder / f"{op}.safetensors")
        outputs = [stored[o["stored"]] for t in manifests[op]["tests"] for o in t.get("outputs", ())]
        floats = [t for t in outputs if t.dtype in (torch.bfloat16, torch.float32)]
        assert sum(int(t.isnan().sum()) for t in floats) > 100
        negative[op] = sum(int((t.isnan() & t.signbit()).sum()) for t in floats)
    assert negative["mx_dequantize"] == 0
    assert negative["pad_token_groups"] > 0


def test_manifests_are_json_that_anything_reads(published):
    folder, manifests = published

    def refuse(constant):  # NaN and Infinity, which Python writes and JSON does not have
        raise AssertionError(constant)

    for op, manifest in manifests.items():
        read = json.loads((folder / f"{op}.json").read_text(), parse_constant=refuse)
        assert read["tests"] == manifest["tests"]


@pytest.mark.turns(3)
def test_the_bytes_are_the_same_without_vector_instructions_and_with_two_threads(published, tmp_path):
    folder, _ = published
    code = "from mxspec import vectors; vectors.export('.', ['mx_quantize', 'fp8_quantize_1x128', 'pad_token_groups'])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (folder / path.name).read_bytes(), path.name
    assert len(list(tmp_path.iterdir())) == 6


# --- what is judged ---------------------------------------------------------------------------------------------


def blocked_in_numpy(scale):
    """The formula of to_blocked's docstring, one element at a time."""
    *lead, R, C = scale.shape
    Rp, Cp = -(-R // 128) * 128, -(-C // 4) * 4
    r, c = np.indices((R, C))
    out = np.zeros((*lead, Rp * Cp), np.uint8)
    out[..., r // 128 * 128 * Cp + c // 4 * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scale
    return out


def test_a_program_without_torch_reads_and_answers(tmp_path):
    """The program uses only bytes, JSON and numpy, as the manifest's `format` says."""
    vectors.export(tmp_path, ["to_blocked"])
    data = (tmp_path / "to_blocked.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    outputs, rejected = {}, {}
    for test in json.loads((tmp_path / "to_blocked.json").read_text())["tests"]:
        [x] = test["inputs"]
        begin, end = header[x["stored"]]["data_offsets"]
        if x["dtype"] not in ("uint8", "float8_e8m0fnu", "float8_e4m3fn") or len(x["shape"]) not in (2, 3):
            rejected[str(test["id"])] = "takes matrices of bytes"
            continue
        flat = np.frombuffer(data[start + begin : start + end], np.uint8)
        scale = np.lib.stride_tricks.as_strided(flat, x["shape"], x["strides"])
        outputs[f"{test['id']}.out"] = blocked_in_numpy(scale)
    (tmp_path / "results").mkdir()
    save_arrays(outputs, tmp_path / "results" / "to_blocked.safetensors")
    (tmp_path / "results" / "to_blocked.json").write_text(json.dumps({"rejected": rejected}))
    results = list(vectors.check(tmp_path))
    assert {r.status for r in results} == {"passed"}
    assert len(results) > 20


def test_right_answers_pass_and_so_does_another_nan(answered):
    name = "random bit patterns, bfloat16, rceil, e4m3fn"
    qdata = answered.outputs[f"{number(answered, name)}.qdata"].view(torch.uint8)
    qdata[qdata == 0x7F] = 0xFF
    assert {r.status for r in answered.judged().values()} == {"passed"}


_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


@pytest.mark.parametrize(
    "form", [lambda t: t.view(torch.uint8), lambda t: t.view(_UNSIGNED[t.itemsize])], ids=["bytes", "integers"]
)
def test_answers_may_be_bits(published, tmp_path, form):
    """Narrow floats, bfloat16 and float32, in the dtypes of a program that lacks these formats."""
    folder, manifests = published
    (tmp_path / "results").mkdir()
    for op in ("mx_quantize", "mx_dequantize"):
        for path in folder.glob(f"{op}.*"):
            shutil.copy(path, tmp_path)
        tests, stored = manifests[op]["tests"], load_file(folder / f"{op}.safetensors")
        outputs = {f"{t['id']}.{o['name']}": form(stored[o["stored"]]) for t in tests for o in t.get("outputs", ())}
        save_file({name: t.clone() for name, t in outputs.items()}, tmp_path / "results" / f"{op}.safetensors")
        valid = {t["comment"] for t in tests if t["result"] == "valid"}
        results = [r for r in vectors.check(tmp_path, [op]) if r.case in valid]
        assert {r.status for r in results} == {"passed"}
        assert len(results) > 20


def test_a_wrong_byte_is_named_with_its_block(answered):
    answered.outputs[f"{number(answered, 'one block')}.qdata"].view(torch.uint8)[0, 31] ^= 1
    results = answered.judged()
    assert [r.case for r in results.values() if r.status == "failed"] == ["one block"]
    assert "output 0: 1 of 32 elements differ, first at [0, 31]: got " in results["one block"].message
    assert "block [0, 0:32]\n  got      " in results["one block"].message


def test_a_column_major_output_is_indexed_by_its_own_shape(answered):
    name = "96x160, axis -2, plain"
    answered.outputs[f"{number(answered, name)}.qdata"].view(torch.uint8)[7, 40] ^= 1  # the index in memory, (K, M)
    assert "first at [40, 7]" in answered.judged()[name].message


def loses_an_output(answered, number):
    del answered.outputs[f"{number}.scale"]


def flattens(answered, number):
    answered.outputs[f"{number}.scale"] = answered.outputs[f"{number}.scale"].flatten()


def gives_floats(answered, number):
    answered.outputs[f"{number}.qdata"] = torch.zeros(1, 32)


def rejects(answered, number):
    answered.said["rejected"][number] = "too small"
    for name in [name for name in answered.outputs if name.partition(".")[0] == number]:
        del answered.outputs[name]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (loses_an_output, "has no output scale"),
        (flattens, "output scale: stored shape (1,); needs (1, 1)"),
        (gives_floats, "output 0: dtype torch.float32; needs torch.float8_e4m3fn"),
        (rejects, "rejected what is valid: too small"),
    ],
)
def test_what_else_is_wrong_is_said(answered, change, words):
    change(answered, number(answered, "one block"))
    results = answered.judged()
    assert [(r.case, r.message) for r in results.values() if r.status == "failed"] == [("one block", words)]


def test_what_must_be_rejected_and_what_is_not_answered(answered):
    refused = number(answered, "K = 100")
    del answered.said["rejected"][refused]
    assert answered.judged()["K = 100"].status == "missing"
    answered.outputs[f"{refused}.qdata"] = torch.zeros(4, 100)
    assert answered.judged()["K = 100"].message == (
        "accepted what must be refused: K = 100 is not a multiple of 32, the block size"
    )
    block = number(answered, "one block")
    del answered.outputs[f"{block}.qdata"], answered.outputs[f"{block}.scale"]
    assert answered.judged()["one block"].status == "missing"
    answered.said["skipped"] = {block: "one row is too few"}
    assert answered.judged()["one block"].status == "skipped"


def test_the_peer_whose_rule_explains_it_is_named(answered):
    name = "random bit patterns, float16, rceil, axis -2"
    case = next(c for c in dispatch.reference("mx_quantize").spec.cases() if c.name == name)
    theirs = rules.te.mx_quantize(*case.args(), **case.kwargs)
    for output, t in zip(("qdata", "scale"), theirs, strict=True):
        entry = answered.outputs[f"{number(answered, name)}.{output}"]
        entry.copy_(t.mT if output == "qdata" else t)  # codes are stored in the order of their memory
    assert answered.judged()[name].message.endswith("your bytes are those of: te")


def another_option(test):
    test["options"]["rounding"] = "stochastic"


def another_dtype(test):
    test["options"]["elem_dtype"] = "float8_e3m4"


@pytest.mark.parametrize("change", [another_option, another_dtype])
def test_vectors_of_another_release_are_judged_without_its_calls(answered, change):
    answered.outputs[f"{number(answered, 'one block')}.qdata"].view(torch.uint8)[0, 31] ^= 1
    file = answered.folder / "mx_quantize.json"
    manifest = json.loads(file.read_text())
    change(next(t for t in manifest["tests"] if t["comment"] == "one block"))
    file.write_text(json.dumps(manifest))
    results = answered.judged()
    assert "1 of 32 elements differ" in results["one block"].message
    assert [r.status for r in results.values()].count("passed") == len(answered.tests) - 1


def test_an_op_of_another_release_is_judged(answered):
    answered.outputs[f"{number(answered, 'one block')}.qdata"].view(torch.uint8)[0, 31] ^= 1
    answered.judged()
    for path in [*answered.folder.glob("mx_quantize.*"), *answered.folder.glob("results/mx_quantize.*")]:
        path.rename(path.with_name(path.name.replace("mx_quantize", "mx_quantize_nearest")))
    assert [r.case for r in vectors.check(answered.folder) if r.status == "failed"] == ["one block"]


def test_what_cannot_be_judged_is_refused(answered):
    answered.outputs["999.qdata"] = torch.zeros(1)
    with pytest.raises(ValueError, match="results of mx_quantize have the id '999'"):
        answered.judged()
    del answered.outputs["999.qdata"]
    answered.judged()
    (answered.folder / "results" / "mx_quantize.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"results/mx_quantize\.safetensors: "):
        list(vectors.check(answered.folder))
    file = answered.folder / "mx_quantize.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    with pytest.raises(ValueError, match=r"is not the file that mx_quantize\.json describes"):
        list(vectors.check(answered.folder))
    with pytest.raises(ValueError, match="holds no vectors; run"):
        list(vectors.check(answered.folder.parent / "nothing"))
    with pytest.raises(ValueError, match="'fp8_gemm' is not judged byte for byte"):
        vectors.export(answered.folder, ["fp8_gemm"])


def test_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["vectors", "export", "out", "--op", "to_blocked"]) == 0
    assert "to_blocked" in capsys.readouterr().out
    assert main(["vectors", "check", "out"]) == 1
    assert capsys.readouterr().err == "mxspec: vectors: out/results has no result of any test\n"
    file = tmp_path / "out" / "to_blocked.safetensors"
    manifest, stored = json.loads(file.with_suffix(".json").read_text()), load_file(file)
    assert manifest["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    outputs = {f"{t['id']}.out": stored[t["outputs"][0]["stored"]].clone() for t in manifest["tests"] if "outputs" in t}
    (tmp_path / "out" / "results").mkdir()

    def checked():
        save_file(outputs, tmp_path / "out" / "results" / "to_blocked.safetensors")
        code, shown = main(["vectors", "check", "out"]), capsys.readouterr().out
        [row] = [line for line in shown.splitlines() if "results" in line and "│" in line]
        return code, shown, [cell.strip() for cell in row.split("│")][3:7]

    missing = str(len(manifest["tests"]) - len(outputs))
    code, _, counts = checked()
    assert (code, counts) == (1, [str(len(outputs)), "0", missing, "0"])
    outputs["1.out"].view(torch.uint8)[5] ^= 1
    code, shown, counts = checked()
    assert (code, counts) == (1, [str(len(outputs) - 1), "1", missing, "0"])
    assert "FAILED to_blocked, test 1, '128x4': output 0: 1 of 512 elements differ, first at [5]: got" in shown
    outputs["1.out"].view(torch.uint8)[5] ^= 1
    rejected = {str(t["id"]): "no" for t in manifest["tests"] if t["result"] == "invalid"}
    (tmp_path / "out" / "results" / "to_blocked.json").write_text(json.dumps({"rejected": rejected}))
    assert checked()[0] == 0


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"skiped": {"2": "x"}}, "needs {'rejected'"),
        ({"rejected": {"1": "x"}, "skipped": {"1": "x"}}, "results of mx_quantize answer test 1 twice"),
        ({"skipped": {"1": "x"}}, "results of mx_quantize answer test 1 twice"),
    ],
)
def test_answers_that_contradict_each_other_are_refused(answered, said, words):
    answered.said.clear()
    answered.said.update(said)
    with pytest.raises(ValueError, match=re.escape(words)):
        answered.judged()


def test_an_answer_to_nothing_is_refused(answered):
    block = number(answered, "one block")
    answered.outputs[f"{block}.extra"] = torch.zeros(1)
    assert answered.judged()["one block"].message == "has an output extra, which the op does not have"
    (answered.folder / "results" / "foo.json").write_text("{}")
    with pytest.raises(ValueError, match=r"foo\.json holds results of no exported op; needs <op>\.safetensors"):
        answered.judged()


@pytest.mark.parametrize("text", ["[]", "{}", '{"op": "other"}', "{", "\udc80"])
def test_a_broken_manifest_is_named(answered, text):
    path = answered.folder / "mx_quantize.json"
    path.unlink()
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"vectors: .*mx_quantize\.json"):
        answered.judged()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file: .*; needs a folder to write to"):
        vectors.export(tmp_path / "file", ["to_blocked"])


def test_no_input_is_a_float_where_the_op_takes_an_integer(published):
    """Some programs cannot tell 32.0 from 32 in JSON."""
    _, manifests = published
    left_out = [entry for m in manifests.values() for entry in m["left_out"] if "a float" in entry["because"]]
    assert "axis -1.0" in [entry["comment"] for entry in left_out]
    options = [option for m in manifests.values() for t in m["tests"] for option in t["options"].items()]
    assert {name for name, value in options if isinstance(value, float) and value.is_integer()} == {"eps"}
