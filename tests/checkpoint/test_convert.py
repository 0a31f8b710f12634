"""convert: what it keeps, what it refuses, and what an interrupted run leaves."""

import hashlib
import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from mxspec import fp8_quantize_128x128, mx_quantize, rules
from mxspec.checkpoint import CheckpointError, convert, pairs, verify
from mxspec.checkpoint.shards import ShardWriter

SEED = 7


def weight(n, k, seed=SEED):
    return (torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.02).bfloat16()


@pytest.fixture
def plain(tmp_path):
    """Two shards with an index, and files that are copied."""
    folder = tmp_path / "plain"
    folder.mkdir()
    shards = {
        "model-00001-of-00002.safetensors": {
            "model.embed_tokens.weight": weight(32, 256, 1),
            "model.layers.0.q_proj.weight": weight(256, 256, 2),
            "model.layers.0.norm.weight": torch.ones(256).bfloat16(),
        },
        "model-00002-of-00002.safetensors": {
            "model.layers.0.o_proj.weight": weight(128, 384, 3),
            "lm_head.weight": weight(32, 256, 4),
        },
    }
    for name, tensors in shards.items():
        save_file(tensors, folder / name, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: shard for shard, tensors in shards.items() for name in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "llama", "dtype": "bfloat16"}')
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "pytorch_model.bin").write_bytes(b"never copied")
    return folder


def loaded(folder):
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def snapshot(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def test_what_is_written(plain, tmp_path):
    before = snapshot(plain)
    manifest = convert(plain, tmp_path / "out", to="fp8_block", rule="deepseek")
    out = tmp_path / "out"
    assert snapshot(plain) == before
    assert {p.name for p in out.iterdir()} == {
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "mxspec_manifest.json",
        "tokenizer.json",
    }
    tensors = loaded(out)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys() == manifest["tensors"].keys()
    codes, scale = rules.deepseek.fp8_quantize_128x128(loaded(plain)["model.layers.0.o_proj.weight"])
    assert tensors["model.layers.0.o_proj.weight"].view(torch.uint8).equal(codes.view(torch.uint8))
    assert tensors["model.layers.0.o_proj.weight_scale_inv"].equal(scale)
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.embed_tokens"],
    }
    assert json.loads((out / "mxspec_manifest.json").read_text()) == manifest
    for name, entry in manifest["tensors"].items():
        data = tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert entry["sha256"] == hashlib.sha256(data).hexdigest()
    assert manifest["tensors"]["lm_head.weight"]["how"] == "copied"
    assert manifest["tensors"]["model.layers.0.q_proj.weight"]["rule"] == "deepseek"


@pytest.mark.parametrize(
    "families",
    [
        ("fp8_block", "ct_fp8_block", "fp8_block"),
        ("fp8_block", "mxfp8", "ct_mxfp8", "modelopt_mxfp8", "mxfp8"),
        ("ct_mxfp4", "modelopt_mxfp4", "ct_mxfp4"),
        ("ct_mxfp4", "fp8_block", "mxfp8"),
        ("ct_mxfp4", "ct_mxfp6", "ct_mxfp8"),
        ("ct_mxfp6", "ct_mxfp6"),
    ],
    ids="-".join,
)
def test_families_that_keep_every_value(plain, tmp_path, families):
    first, *others = families
    scales = "ue8m0"
    convert(plain, tmp_path / "0", to=first, scales=scales)
    convert(tmp_path / "0", tmp_path / "values", to="bf16")
    want = loaded(tmp_path / "values")
    for i, family in enumerate(others):
        manifest = convert(tmp_path / str(i), tmp_path / str(i + 1), to=family, scales=scales)
        assert all(entry["lossless"] for entry in manifest["tensors"].values())
        shutil.rmtree(tmp_path / "values")
        convert(tmp_path / str(i + 1), tmp_path / "values", to="bf16")
        got = loaded(tmp_path / "values")
        assert got.keys() == want.keys()
        assert all(got[name].view(torch.int16).equal(want[name].view(torch.int16)) for name in want), family
    if families[0] == families[-1]:
        first, last = loaded(tmp_path / "0"), loaded(tmp_path / str(len(others)))
        assert first.keys() == last.keys()
        assert all(first[name].view(torch.uint8).equal(last[name].view(torch.uint8)) for name in first)


def test_a_weight_that_cannot_keep_its_values_is_refused_or_said(plain, tmp_path):
    convert(plain, tmp_path / "fp8", to="fp8_block")  # fp32 scales are no powers of two
    with pytest.raises(CheckpointError, match=r"q_proj\.weight: 4 of 4 blocks would change, .* block \(0, 0\)"):
        convert(tmp_path / "fp8", tmp_path / "mx", to="mxfp8")
    manifest = convert(tmp_path / "fp8", tmp_path / "mx", to="mxfp8", allow_lossy=True)  # as the refusal says
    entry = manifest["tensors"]["model.layers.0.q_proj.weight"]
    assert (entry["how"], entry["lossless"], entry["rule"]) == ("quantized again", False, "contract")
    assert "4 of 4 blocks" in entry["why"]
    assert manifest["allow_lossy"]


def test_an_interrupted_run_goes_on(plain, tmp_path, monkeypatch):
    done = []
    finish = ShardWriter.finish

    def second_fails(self):
        if len(done) == 1:
            self.abandon()
            raise OSError(28, "No space left on device")
        done.append(self.path.name)
        return finish(self)

    monkeypatch.setattr(ShardWriter, "finish", second_fails)
    before = snapshot(plain)
    with pytest.raises(OSError, match=r"No space left on device; missing in .*out: model-00002-of-00002\.safetensors"):
        convert(plain, tmp_path / "out", to="mxfp8")
    assert snapshot(plain) == before
    assert {p.name for p in (tmp_path / "out").iterdir()} == {done[0], ".mxspec_partial.json"}
    monkeypatch.setattr(ShardWriter, "finish", lambda self: done.append(self.path.name) or finish(self))
    convert(plain, tmp_path / "out", to="mxfp8")
    assert done == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]  # the first was not redone
    convert(plain, tmp_path / "whole", to="mxfp8")
    again, whole = snapshot(tmp_path / "out"), snapshot(tmp_path / "whole")
    assert again == whole


def test_a_shard_that_was_damaged_between_two_runs_is_written_again(plain, tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules[convert.__module__], "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(plain, tmp_path / "out", to="mxfp8")
    monkeypatch.undo()
    path = tmp_path / "out" / "model-00001-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    convert(plain, tmp_path / "out", to="mxfp8")
    convert(plain, tmp_path / "whole", to="mxfp8")
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")


def test_include_and_exclude(plain, tmp_path):
    manifest = convert(plain, tmp_path / "a", to="mxfp8", include=["*.q_proj*"])
    assert [n for n, t in manifest["tensors"].items() if t["how"] == "quantized"] == [
        "model.layers.0.q_proj.weight",
        "model.layers.0.q_proj.weight_scale_inv",
    ]
    convert(plain, tmp_path / "b", to="mxfp8")
    manifest = convert(tmp_path / "b", tmp_path / "c", to="ct_mxfp8", exclude=["*.q_proj*"])
    assert manifest["tensors"]["model.layers.0.q_proj.weight"]["how"] == "dequantized"
    config = json.loads((tmp_path / "c" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.q_proj" in config["ignore"]


def test_what_a_quantized_source_leaves_plain_stays_plain(plain, tmp_path):
    convert(plain, tmp_path / "a", to="fp8_block", scales="ue8m0", exclude=["*.q_proj*"])
    manifest = convert(tmp_path / "a", tmp_path / "b", to="ct_mxfp8")
    tensors = manifest["tensors"]
    assert tensors["model.layers.0.q_proj.weight"]["how"] == "copied"
    assert {entry["how"] for entry in tensors.values()} == {"copied", "kept"}
    config = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.q_proj" in config["ignore"]
    manifest = convert(tmp_path / "a", tmp_path / "c", to="ct_mxfp8", include=["*_proj*"])
    assert manifest["tensors"]["model.layers.0.q_proj.weight"]["how"] == "quantized"
    assert "copied" not in {entry["how"] for name, entry in manifest["tensors"].items() if "_proj" in name}


def test_modelopt_has_a_file_of_its_own(plain, tmp_path):
    manifest = convert(plain, tmp_path / "out", to="modelopt_mxfp8", rule="modelopt")
    config = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    assert config["quantization"] == {
        "quant_algo": "MXFP8",
        "group_size": 32,
        "kv_cache_quant_algo": None,
        "exclude_modules": ["lm_head", "model.embed_tokens"],
    }
    assert "transformers has no loader of modelopt_mxfp8" in manifest["warnings"][0]


def test_a_source_without_its_configuration_is_a_warning(plain, tmp_path):
    with_it = convert(plain, tmp_path / "a", to="mxfp8")
    (plain / "config.json").unlink()
    without = convert(plain, tmp_path / "b", to="mxfp8")
    (said,) = set(without["warnings"]) - set(with_it["warnings"])
    assert "the config.json that was written names no model_type" in said


def test_a_partial_block_is_a_warning_that_names_the_loader(plain, tmp_path):
    save_file({"a.q_proj.weight": weight(192, 128)}, plain / "model-00002-of-00002.safetensors")
    (plain / "model.safetensors.index.json").unlink()
    manifest = convert(plain, tmp_path / "out", to="fp8_block")
    assert (
        "the first is a.q_proj.weight (192, 128): transformers takes the block from the shape"
        in manifest["warnings"][0]
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"to": "fp4"}, ValueError, "no family is named 'fp4'; there are bf16, fp8_block"),
        ({"to": "mxfp8", "scales": "fp32"}, ValueError, "mxfp8 has no scales 'fp32'; needs ue8m0"),
        ({"to": "fp8_block", "scales": "bf16"}, ValueError, "needs fp32 or ue8m0"),
        ({"to": "mxfp8", "rule": "deepseek"}, ValueError, "'deepseek' does not quantize to mxfp8"),
        ({"to": "mxfp8", "rule": "nobody"}, ValueError, "no rule is named 'nobody'"),
        ({"to": "ct_fp8_block", "scales": "ue8m0", "rule": "compressed_tensors"}, ValueError, "with scales ue8m0"),
        ({"to": "gptoss_mxfp4"}, CheckpointError, "transformers and vLLM read it for gpt_oss alone"),
        ({"to": "bf16"}, CheckpointError, "no weight of .* is to be changed"),
        ({"to": "mxfp8", "include": ["nothing"]}, CheckpointError, "no weight of .* is to be changed"),
    ],
)
def test_refusals(plain, tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        convert(plain, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_an_error_lists_the_rules_that_quantize_to_the_family(plain, tmp_path):
    """A rule may have the family's op and not its elements or scales: torchao's mx_quantize has no e2m3."""
    listed = {}
    for to, scales in (("ct_mxfp6", None), ("mxfp8", None), ("ct_fp8_block", "ue8m0"), ("ct_nvfp4", None)):
        refused = "torchao" if to == "ct_mxfp6" else "compressed_tensors" if to == "ct_fp8_block" else "nobody"
        with pytest.raises(ValueError, match=r"\. Rules that quantize to \w+ with \w+ scales: contract, ") as caught:
            convert(plain, tmp_path / to, to=to, scales=scales, rule=refused)
        listed[to] = str(caught.value).rpartition(": ")[2].split(", ")
        for rule in listed[to]:  # each can be asked for
            convert(plain, tmp_path / f"{to} {rule}", to=to, scales=scales, rule=rule)
        others = {"contract", *rules.peers()} - set(listed[to])
        for rule in others:
            with pytest.raises(ValueError, match=f"{rule}.* does not quantize to"):
                convert(plain, tmp_path / to, to=to, scales=scales, rule=rule)
    assert listed["ct_mxfp6"] == ["contract", "compressed_tensors", "gfloat", "ocp"]


def test_places_that_are_refused(plain, tmp_path):
    for place, what in ((plain, "is"), (plain / "out", "lies inside"), (plain / ".." / "plain", "is")):
        with pytest.raises(CheckpointError, match=f"the destination .* {what} the source"):
            convert(plain, place, to="mxfp8")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"is not empty, it holds notes\.txt"):
        convert(plain, tmp_path / "full", to="mxfp8")
    with pytest.raises(CheckpointError, match="needs a directory of safetensors files"):
        convert(tmp_path / "nowhere", tmp_path / "out", to="mxfp8")
    convert(plain, tmp_path / "done", to="mxfp8")
    with pytest.raises(CheckpointError, match="holds this conversion already, and it is complete"):
        convert(plain, tmp_path / "done", to="mxfp8")
    with pytest.raises(CheckpointError, match=r"is not empty, it holds .*; needs a new directory"):
        convert(plain, tmp_path / "done", to="ct_mxfp8")


def test_a_broken_source_is_named(plain, tmp_path):
    path = plain / "model-00002-of-00002.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: .* offsets"):
        convert(plain, tmp_path / "out", to="mxfp8")
    path.unlink()
    with pytest.raises(CheckpointError, match=r"lacks the shard model-00002-of-00002\.safetensors"):
        convert(plain, tmp_path / "out", to="mxfp8")


def test_a_numbered_series_without_an_index_must_be_whole(plain, tmp_path):
    (plain / "model.safetensors.index.json").unlink()
    (plain / "model-00002-of-00002.safetensors").unlink()
    needs = r"plain lacks model-00002-of-00002\.safetensors; it has model-00001-of-00002\.safetensors"
    with pytest.raises(CheckpointError, match=needs):
        convert(plain, tmp_path / "out", to="mxfp8")
    (plain / "model-00001-of-00002.safetensors").rename(plain / "model-00001-of-00009.safetensors")
    with pytest.raises(CheckpointError, match=r"plain lacks model-00002-of-.*00005-of-00009\.safetensors and more;"):
        convert(plain, tmp_path / "out", to="mxfp8")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("family", "other"), [("ct_mxfp4", "modelopt_mxfp4"), ("mxfp8", "ct_mxfp8")])
def test_a_byte_255_among_the_scales_is_refused(plain, tmp_path, family, other):
    convert(plain, tmp_path / "mx", to=family)
    tensors = load_file(tmp_path / "mx" / "model-00001-of-00002.safetensors")
    scale = next(name for name, x in tensors.items() if "_scale" in name)
    tensors[scale][5, 1] = 255
    save_file(tensors, tmp_path / "mx" / "model-00001-of-00002.safetensors")
    words = f"{scale} in model-00001-of-00002.safetensors: 1 of {tensors[scale].numel()} scales are NaN, the first is"
    with pytest.raises(CheckpointError) as raised:
        convert(tmp_path / "mx", tmp_path / "out", to=other, allow_lossy=True)
    assert str(raised.value) == f"{words} (5, 1); needs numbers"


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_weight_with_a_nan_is_refused(plain, tmp_path, value):
    bad = weight(256, 128)
    bad[130, 5] = value
    save_file({"a.q_proj.weight": bad}, plain / "model-00002-of-00002.safetensors")
    (plain / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"a\.q_proj\.weight: rows 128 to 255 hold a NaN or an Inf"):
        convert(plain, tmp_path / "out", to="fp8_block")


def rewritten(path, change):
    """The file with another header."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = change(data[8 : 8 + size].decode())
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + data[8 + size :])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[:40], "Expecting|Unterminated"),
        (lambda text: text.replace("BF16", "F4", 1), "which do not fit F4"),
        (lambda text: text.replace("[256,256]", "[256,512]"), "which do not fit BF16"),
        (
            lambda text: text.replace("lm_head.weight", "model.layers.0.o_proj.weight"),
            "has 'model.layers.0.o_proj.weight' twice",
        ),
        (lambda text: "[]", "the header is not a JSON object"),
    ],
    ids=["cut", "dtype", "shape", "twice", "no object"],
)
def test_a_header_that_lies_is_refused_before_anything_is_written(plain, tmp_path, change, words):
    both = [plain / f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for path in both:
        rewritten(path, change)
    with pytest.raises(CheckpointError, match=words):
        convert(plain, tmp_path / "out", to="mxfp8")
    assert not (tmp_path / "out").exists()


def test_tensors_that_overlap_are_refused(plain, tmp_path):
    def overlap(text):
        header = json.loads(text)
        header["again"] = header["lm_head.weight"]
        return json.dumps(header)

    rewritten(plain / "model-00002-of-00002.safetensors", overlap)
    with pytest.raises(CheckpointError, match="overlap"):
        convert(plain, tmp_path / "out", to="mxfp8")


def test_pickles_are_not_read(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(CheckpointError, match=r"holds no safetensors file; .*\.bin"):
        convert(tmp_path / "old", tmp_path / "out", to="mxfp8")


@pytest.mark.parametrize("family", ["fp8_block", "ct_mxfp4"])
def test_a_wide_weight_is_quantized_in_pieces_to_the_same_bytes(plain, tmp_path, family):
    wide = weight(130, 4096 + 160)
    save_file({"a.q_proj.weight": wide}, plain / "model-00002-of-00002.safetensors")
    (plain / "model.safetensors.index.json").unlink()
    convert(plain, tmp_path / "out", to=family)
    tensors = loaded(tmp_path / "out")
    padded = torch.nn.functional.pad(wide, (0, 96))
    if family == "fp8_block":
        codes, scale = fp8_quantize_128x128(padded)
        assert tensors["a.q_proj.weight"].view(torch.uint8).equal(codes.view(torch.uint8)[:, :4256])
        assert tensors["a.q_proj.weight_scale_inv"].equal(scale)
    else:
        codes, scale = mx_quantize(wide, elem_dtype="e2m1")
        assert tensors["a.q_proj.weight_packed"].equal(codes.view(torch.uint8))
        assert tensors["a.q_proj.weight_scale"].equal(scale.view(torch.uint8))


def only(plain, tensors):
    """The source with these tensors alone."""
    for path in plain.glob("model*"):
        path.unlink()
    save_file(tensors, plain / "model.safetensors")


def test_deepseek_v4_has_fp4_experts_that_become_fp8_without_loss(plain, tmp_path):
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (128, 128), generator=generator, dtype=torch.uint8)
    scale = torch.randint(110, 120, (128, 8), generator=generator, dtype=torch.uint8)
    dense, dense_scale = rules.deepseek.fp8_quantize_128x128(weight(256, 256), scale_format="pow2")
    only(
        plain,
        {
            "layers.0.ffn.experts.0.w1.weight": codes.view(torch.int8),
            "layers.0.ffn.experts.0.w1.scale": scale.view(torch.float8_e8m0fnu),
            "layers.0.attn.wo.weight": dense,
            "layers.0.attn.wo.scale": dense_scale.to(torch.float8_e8m0fnu),
            "layers.0.ffn.gate.weight": weight(8, 256),
        },
    )
    manifest = convert(plain, tmp_path / "fp8", to="fp8_block", scales="ue8m0")
    assert all(entry["lossless"] for entry in manifest["tensors"].values())
    assert manifest["tensors"]["layers.0.ffn.gate.weight"]["how"] == "copied"
    verdict = verify(plain, tmp_path / "fp8")
    assert str(verdict) == "3 equal"


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (
            {"a.weight": weight(128, 128).to(torch.float8_e4m3fn)},
            r"a\.weight in model\.safetensors: FP8 codes without a scale",
        ),
        ({"a.weight_scale_inv": torch.ones(1, 1)}, r"a\.weight_scale_inv in model\.safetensors: scales without codes"),
        (
            {"a.weight": weight(128, 128).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(1)},
            r"\(128, 128\) with a\.weight_scale torch\.float32 \(1,\) is no scheme .*; it knows fp8_128x128, mxfp8",
        ),
        (
            {
                "a.weight": torch.zeros(64, 32, dtype=torch.uint8),
                "a.weight_scale": weight(64, 4).to(torch.float8_e4m3fn),
            },
            r"a\.weight in model\.safetensors has no scale of the whole tensor; needs a\.weight_scale_2",
        ),
    ],
    ids=["no scale", "no codes", "one scale", "NVFP4"],
)
def test_what_is_no_known_family_is_refused(plain, tmp_path, tensors, words):
    only(plain, {**tensors, "b.q_proj.weight": weight(128, 128)})
    with pytest.raises(CheckpointError, match=words):
        convert(plain, tmp_path / "out", to="mxfp8")


def test_a_dtype_that_the_peer_lacks_is_named(plain, tmp_path):
    only(plain, {"a.q_proj.weight": weight(128, 128).half()})
    with pytest.raises(CheckpointError, match=r"a\.q_proj\.weight: .* has no recorded result for float16"):
        convert(plain, tmp_path / "out", to="ct_mxfp8", rule="compressed_tensors")


def test_scalars_and_empty_tensors_are_copied(plain, tmp_path):
    odd = {"a.step": torch.tensor(3), "a.none": torch.empty(0, 4), "a.q_proj.weight": weight(64, 32)}
    only(plain, odd)
    convert(plain, tmp_path / "out", to="mxfp8")
    tensors = loaded(tmp_path / "out")
    assert tensors["a.step"].item() == 3
    assert tensors["a.none"].shape == (0, 4)
    assert tensors["a.q_proj.weight_scale_inv"].shape == (64, 1)


@pytest.mark.parametrize(
    ("config", "name", "warnings"),
    [
        ({"num_experts": 3}, "model.layers.0.mlp.up_proj", 1),
        ({"text_config": {"num_experts": 3}}, "model.layers.0.mlp.up_proj", 1),
        ({}, "model.layers.0.mlp.experts.0.up_proj", 1),
        ({"text_config": {"num_experts": 0}, "vision_config": {}}, "model.layers.0.mlp.up_proj", 0),
    ],
)
def test_experts_of_compressed_tensors_are_warned_of_wherever_they_are_said(config, name, warnings):
    said = pairs.warnings({"model_type": "qwen3_vl_moe", **config}, "ct_nvfp4", "e4m3", [(f"{name}.weight", (64, 64))])
    assert sum("does not read ct_nvfp4 experts of qwen3_vl_moe" in one for one in said) == warnings
