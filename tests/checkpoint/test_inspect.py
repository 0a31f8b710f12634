"""`inspect` names the fault of each corrupted checkpoint, and each trap: a file that a loader reads wrongly."""

import json
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from mxspec.__main__ import main
from mxspec.checkpoint import convert, inspect
from tests.helpers import ROOT

Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"
INV, S = ".weight_scale_inv", ".weight_scale"


def plain(folder, shapes=None, kind="llama", experts=False):
    """Plain weights of a tiny model."""
    generator = torch.Generator().manual_seed(0)
    folder.mkdir(parents=True)
    shapes = shapes or {Q: (256, 256), UP: (256, 128)}
    if experts:
        shapes = {"model.layers.0.mlp.experts.3.up_proj": (128, 128)}
    tensors = {f"{n}.weight": 0.02 * torch.randn(s, generator=generator).bfloat16() for n, s in shapes.items()}
    if kind == "gpt_oss":
        name = "model.layers.0.mlp.experts.down_proj"
        tensors = {name: 0.02 * torch.randn(2, 128, 64, generator=generator).bfloat16()}
    save_file({**tensors, "model.norm.weight": torch.ones(256)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **({"num_experts": 4} if experts else {})}))
    return folder


@pytest.fixture
def made(tmp_path):
    """A function that writes a checkpoint in a family."""

    def make(to="fp8_block", scales=None, **options):
        source = plain(tmp_path / "plain", **options)
        convert(source, tmp_path / "model", to=to, scales=scales, rule="contract")
        return tmp_path / "model"

    return make


def the_file(folder):
    return next(folder.glob("*.safetensors"))


def change(folder, edit):
    """Write the tensors again after an edit of the dictionary."""
    tensors = load_file(the_file(folder))
    edited = edit(tensors)
    tensors = edited if isinstance(edited, dict) else tensors
    save_file({name: x.contiguous() for name, x in tensors.items()}, the_file(folder))
    if (index := folder / "model.safetensors.index.json").exists():
        index.unlink()


def configure(folder, edit):
    config = json.loads((folder / "config.json").read_text())
    edit(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


def renamed(old, new):
    return lambda t: {name.replace(old, new): x for name, x in t.items()}


def put(name, make):
    return lambda t: t.update({name: make(t[name])})


def at(index, value):
    def make(x):
        x.view(-1).view(torch.uint8 if x.element_size() == 1 else x.dtype)[index] = value
        return x

    return make


def both(old, new):
    """The second weight stored as another family stores it."""

    def edit(t):
        x = t.pop(UP + old)
        t[UP + new] = x

    return edit


def nvfp4(t, second, value):
    packed = ".weight_packed" if "global" in second else ".weight"
    codes = torch.randint(0, 256, (64, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    grid = torch.full((64, 4), 448.0).to(torch.float8_e4m3fn)
    t.clear()
    t.update({Q + packed: codes, Q + S: grid})
    if second.startswith("."):
        t[Q + second] = torch.tensor([value])


E8M0_OF = {"as numbers": lambda x: x.float(), "as bf16": lambda x: x.bfloat16()}

# name: (family, options of convert, edit, kind of the problem, words)
CORRUPTED = {
    "scale is missing": ("fp8_block", {}, lambda t: t.pop(Q + INV), "missing scale", f"needs {Q}.weight_scale_inv"),
    "scale without codes": ("fp8_block", {}, lambda t: t.pop(Q + ".weight"), "scale without codes", Q + INV),
    "scale beside a plain weight": (
        "fp8_block",
        {},
        put(Q + ".weight", lambda x: x.float().bfloat16()),
        "scale without codes",
        Q + INV,
    ),
    "renamed scale": ("fp8_block", {}, renamed(INV, ".scaling_factor_scale"), "renamed scale", "scaling_factor_scale"),
    "named as in compressed-tensors": (
        "fp8_block",
        {},
        renamed(INV, S),
        "configuration",
        "stored as ct_fp8_block",
    ),
    "mxfp8 under weight_scale": ("mxfp8", {}, renamed(INV, S), "configuration", "says 'mxfp8'; .* with .*weight_scale"),
    "wrong grid": (
        "fp8_block",
        {},
        put(Q + INV, lambda x: x[:1]),
        "grid",
        r"F32 \[1, 2\]; needs \[2, 2\] \(fp8",
    ),
    "transposed grid": ("fp8_block", {}, put(UP + INV, lambda x: x.T), "grid", r"F32 \[1, 2\]; needs \[2, 1\]"),
    "wrong grid of mxfp8": (
        "mxfp8",
        {},
        put(Q + INV, lambda x: x[:, :4]),
        "grid",
        r"\[256, 4\]; needs .*\[256, 8\]",
    ),
    "swizzled scale": ("mxfp8", {}, put(Q + INV, lambda x: x.flatten()), "swizzled scale", "one dimension"),
    "packed scale": (
        "mxfp8",
        {},
        put(Q + INV, lambda x: x.contiguous().view(torch.int32)),
        "packed scale",
        "four E8M0 bytes in an int32",
    ),
    "bytes cast to floats": ("mxfp8", {}, put(Q + INV, lambda x: x.float()), "dtype of scale", "was a byte cast"),
    "bytes cast to bf16": ("ct_mxfp4", {}, put(Q + S, lambda x: x.bfloat16()), "dtype of scale", "was a byte cast"),
    "bytes of blocks cast": (
        "fp8_block",
        {"scales": "ue8m0"},
        put(Q + INV, lambda x: torch.log2(x) + 127),
        "byte cast to a number",
        "E8M0 bytes as numbers",
    ),
    "NaN scale": ("fp8_block", {}, put(Q + INV, at(1, torch.nan)), "NaN scale", "1 of 4 scales are NaN"),
    "byte 0xFF": (
        "mxfp8",
        {},
        put(Q + INV, at(5, 255)),
        "NaN scale",
        "1 of 2048 scales are NaN, 1 of them the byte 0xFF",
    ),
    "infinite scale": ("fp8_block", {}, put(Q + INV, at(1, torch.inf)), "infinite scale", "1 of 4"),
    "negative scale": ("fp8_block", {}, put(Q + INV, at(1, -1.0)), "negative scale", "1 of 4"),
    "one scale is zero": ("fp8_block", {}, put(Q + INV, at(2, 0.0)), "zero scale", r"block \(1, 0\) is zero"),
    "all scales are zero": ("fp8_block", {}, put(Q + INV, torch.zeros_like), "zero scale", "were they ever written"),
    "all bytes are zero": ("ct_mxfp4", {}, put(Q + S, torch.zeros_like), "zero scale", "all 2048 bytes are zero"),
    "all codes are zero": ("mxfp8", {}, put(Q + ".weight", torch.zeros_like), "zero codes", "all 65536 codes"),
    "NaN code": ("mxfp8", {}, put(Q + ".weight", at(7, 0x7F)), "NaN code", "1 of 65536 codes"),
    "scales are divisors": ("fp8_block", {}, put(Q + INV, lambda x: 1 / x), "direction", "may be divisors"),
    "tiny scales": ("fp8_block", {}, put(Q + INV, lambda x: x * 1e-30), "direction", "may be wrong"),
    "two families": ("fp8_block", {}, both(INV, S), "two families", "mixes families: ct_fp8_block .*, fp8_block"),
    "global scale inverted": (
        "ct_mxfp4",
        {},
        lambda t: nvfp4(t, ".weight_global_scale", 1 / 26880),
        "direction",
        "inverted. It is a divisor",
    ),
    "second scale inverted": (
        "modelopt_mxfp4",
        {},
        lambda t: nvfp4(t, ".weight_scale_2", 26880.0),
        "direction",
        "inverted. It is a multiplier",
    ),
    "global scale is zero": (
        "ct_mxfp4",
        {},
        lambda t: nvfp4(t, ".weight_global_scale", 0.0),
        "scale of the tensor",
        "needs a positive number",
    ),
    "global scale is missing": (
        "ct_mxfp4",
        {},
        lambda t: nvfp4(t, "global", 1.0),
        "missing scale",
        "weight_global_scale",
    ),
}


@pytest.mark.parametrize("name", CORRUPTED)
def test_a_corrupted_checkpoint_is_named(made, name, capsys):
    family, options, edit, kind, words = CORRUPTED[name]
    folder = made(family, **options)
    assert inspect(folder).problems == []
    change(folder, edit)
    found = inspect(folder)
    assert kind in {problem.kind for problem in found.problems}, found.problems
    assert re.search(words, str([str(p) for p in found.problems if p.kind == kind]))
    assert main(["checkpoint", "inspect", str(folder)]) == found.exit_code == 1
    assert kind in capsys.readouterr().out


CONFIGURATIONS = {
    "method": (lambda c: c.update(quant_method="modelopt"), "says 'modelopt'; .* is stored as fp8_block"),
    "block": (lambda c: c.update(weight_block_size=[1, 32]), r"weight_block_size \[1, 32\]; .* has \[128, 128\]"),
    "scale_fmt": (lambda c: c.update(scale_fmt="ue8m0"), "no powers of two; config.json has scale_fmt ue8m0"),
    "excluded": (lambda c: c["modules_to_not_convert"].append(Q), "is quantized, and the configuration excludes"),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_configuration_that_does_not_fit_is_named(made, name):
    edit, words = CONFIGURATIONS[name]
    folder = made()
    configure(folder, edit)
    (problem, *_) = found = inspect(folder).problems
    assert problem.kind == "configuration"
    assert re.search(words, str([str(p) for p in found]))


def test_a_configuration_without_the_weights_and_weights_without_a_configuration(made):
    folder = made()
    whole = (folder / "config.json").read_text()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert [str(p) for p in inspect(folder).problems] == [
        f"config.json: has no quantization_config; {UP}.weight is quantized"
    ]
    (folder / "config.json").write_text(whole)
    change(folder, lambda t: {"a.weight": torch.ones(2, 2)})
    assert [str(p) for p in inspect(folder).problems] == [
        "config.json: says 'fp8', and no weight is quantized in a known way"
    ]


ONE_EXACT = put(Q + S, at(0, 2.0**-12))

# name: (family, options of the model, what is changed in the tensors, loader, words)
TRAPS = {
    "960 rows": ("fp8_block", {"shapes": {Q: (960, 128)}}, None, "transformers 5.23", "960 rows: .* block as 120"),
    "192 columns": ("fp8_block", {"shapes": {Q: (128, 192)}}, None, "transformers 5.17", "192 columns: .* block as 96"),
    "320 rows": ("fp8_block", {"shapes": {Q: (320, 128)}}, None, "transformers 5.17", "320 rows: transformers raises"),
    "fp32": ("fp8_block", {}, None, "vLLM", "fp32 scales are no powers of two: .* 0.037 instead of 0.027"),
    "fp32 in sglang": ("fp8_block", {}, None, "SGLang", "requantize to powers of two"),
    "not exact in bf16": (
        "ct_fp8_block",
        {},
        ONE_EXACT,
        "transformers 5.17",
        "fp32 scales are rounded to bfloat16",
    ),
    "odd K": ("ct_fp8_block", {"shapes": {Q: (128, 160)}}, None, "compressed-tensors", "forward raises"),
    "saved again": ("fp8_block", {}, None, "transformers 5.23", "saving changes fp32 scales"),
    "90 blocks": ("gptoss_mxfp4", {"kind": "gpt_oss"}, None, "transformers 5.23", "assumes 90 blocks"),
    "modelopt": ("modelopt_mxfp8", {}, None, "transformers 5.23", "quant_method modelopt is unknown"),
    "experts": ("ct_mxfp8", {"experts": True}, None, "compressed-tensors", "experts are loaded as raw codes"),
    "bytes": (
        "fp8_block",
        {},
        put(Q + INV, lambda x: torch.full_like(x, 118, dtype=torch.uint8)),
        "vLLM",
        "cast the byte to a number",
    ),
    "zeroed": ("gptoss_mxfp4", {"kind": "gpt_oss"}, None, "SGLang", "leave the scales of experts zero"),
    "spread": ("ct_mxfp4", {}, put(Q + S, at(0, 90)), "vLLM", "exponents spread by .* MXFP4 to FP8"),
    "NaN scale": ("ct_mxfp4", {}, put(Q + S, at(0, 255)), "vLLM", r"'1 scales are NaN: MXFP4 to FP8"),
    "tensor parallel": ("fp8_block", {"shapes": {Q: (320, 128)}}, None, "vLLM", "320 is no multiple of 128"),
    "divisor": (
        "ct_mxfp4",
        {},
        lambda t: nvfp4(t, ".weight_global_scale", 26880.0),
        "vLLM",
        "weight_global_scale divides",
    ),
}


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_is_named_for_its_loader_with_its_source(made, name):
    family, options, edit, loader, words = TRAPS[name]
    folder = made(family, **options)
    if edit:
        change(folder, edit)
    found = inspect(folder)
    mine = [trap for trap in found.traps if loader in trap.loaders]
    assert all(trap.source for trap in mine)
    assert re.search(words, str([trap.message for trap in mine]))


def test_the_last_line_names_the_loaders_that_read_wrong_weights(made):
    found = inspect(made("fp8_block", shapes={Q: (960, 128)}))
    assert str(found).splitlines()[-1].endswith("wrong in transformers 5.17, transformers 5.23, see the table")


def test_whole_tiles_of_powers_of_two_are_read_by_all(made):
    found = inspect(made("fp8_block", scales="ue8m0"))
    assert str(found).splitlines()[-1].endswith(": no problems")
    assert (found.problems, found.traps, found.exit_code) == ([], [], 0)
    readers = {loader for loader, verdict in found.loaders.items() if verdict == "yes"}
    assert readers == {"transformers 5.17", "transformers 5.23", "vLLM", "SGLang"}
    (q, up) = sorted(found.groups, key=lambda group: group.pattern, reverse=True)
    assert (q.pattern, q.shape, q.grid, q.family.block) == (
        "model.layers.*.self_attn.q_proj.weight",
        (256, 256),
        (2, 2),
        (128, 128),
    )
    assert q.scales.powers_of_two
    assert q.scales.exact_in_bf16
    assert q.codes.count == 256 * 256
    assert up.weights == 1


def test_the_counts_of_codes_are_those_of_the_tensor(made):
    folder = made("mxfp8", shapes={Q: (128, 64)})
    codes = load_file(the_file(folder))[f"{Q}.weight"].view(torch.uint8)
    (group,) = inspect(folder).groups
    assert group.codes.counts == torch.bincount(codes.flatten().long(), minlength=256).tolist()
    assert group.codes.saturated == int(((codes & 0x7F) == 0x7E).sum())


def test_both_codes_of_a_byte_are_counted(made):
    folder = made("ct_mxfp4", shapes={Q: (128, 64)})
    codes = load_file(the_file(folder))[f"{Q}.weight_packed"].flatten().long()
    (group,) = inspect(folder).groups
    assert group.codes.counts == torch.bincount(torch.cat((codes & 15, codes >> 4)), minlength=16).tolist()


def test_numbered_names_are_one_row_and_scales_elsewhere_are_counted(tmp_path):
    one, two = {}, {}
    for layer in range(3):
        for expert in range(4):
            name = f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"
            one[name] = torch.full((128, 128), 0x38 + layer, dtype=torch.uint8).view(torch.float8_e4m3fn)
            two[f"{name}_scale_inv"] = torch.full((1, 1), 0.5)
    save_file(one, tmp_path / "a.safetensors")
    save_file(two, tmp_path / "b.safetensors")
    found = inspect(tmp_path)
    (group,) = found.groups
    assert (group.pattern, group.weights) == ("model.layers.*.mlp.experts.*.up_proj.weight", 12)
    assert (group.other_shard, group.scales.count) == (12, 12)
    assert "12 in another shard" in str(found)
    named = {**dict.fromkeys(one, "a.safetensors"), **dict.fromkeys(two, "b.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    for shard in "ab":
        found = inspect(tmp_path / f"{shard}.safetensors")
        assert (found.problems, found.notes) == ([], ["12 tensors of the index are in other shards, and are not read"])


def test_a_numbered_shard_that_is_missing_is_named_without_an_index(tmp_path):
    save_file({"a.weight": torch.ones(2)}, tmp_path / "model-00002-of-00002.safetensors")
    (problem,) = inspect(tmp_path).problems
    assert str(problem).startswith("model-00001-of-00002.safetensors: is missing")


def test_the_command_takes_one_tensor_and_writes_json(made, capsys):
    folder = made()
    assert main(["checkpoint", "inspect", f"{folder}:{Q}.weight", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [group["first"] for group in found["groups"]] == [f"{Q}.weight"]
    assert found["groups"][0]["direction"] == "multiplier"
    assert main(["checkpoint", "inspect", f"{folder}:nothing"]) == 2
    assert "no tensor of" in capsys.readouterr().err
    assert main(["checkpoint", "inspect", str(the_file(folder))]) == 0


def test_what_cannot_be_read_is_exit_code_2(tmp_path, capsys):
    path = tmp_path / "model.safetensors"
    path.write_bytes((1 << 40).to_bytes(8, "little"))
    assert main(["checkpoint", "inspect", str(path)]) == 2
    assert "said to have 1099511627776 bytes" in capsys.readouterr().out
    assert main(["checkpoint", "inspect", str(tmp_path / "nowhere")]) == 2
    (tmp_path / "model.bin").write_bytes(b"cos\nsystem\n")
    assert main(["checkpoint", "inspect", str(tmp_path / "model.bin")]) == 2
    assert "files that hold pickles are not read" in capsys.readouterr().out


def test_memory_stays_under_three_times_the_largest_tensor(tmp_path):
    size = 64 << 20
    codes = torch.zeros(size // 8192, 8192, dtype=torch.uint8).view(torch.float8_e4m3fn)
    save_file(
        {"a.weight": codes, "a.weight_scale_inv": torch.ones(size // 8192 // 128, 64)}, tmp_path / "a.safetensors"
    )
    program = (
        "import resource, sys; from mxspec.checkpoint import inspect;"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; inspect(sys.argv[1]);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert int(ran.stdout) * 1024 < size  # pieces are read, and never a whole tensor of codes
