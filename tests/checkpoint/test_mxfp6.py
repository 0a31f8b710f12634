"""MXFP6: the bytes of compressed-tensors' compressor, what inspect counts, and the changes that keep every value."""

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mxspec.checkpoint import CheckpointError, convert, inspect, verify

Q = "model.layers.0.self_attn.q_proj"
# SHA-256 of `weight_packed` and `weight_scale` that compressed-tensors 0.20.0 gave for `plain` on a CPU:
# `calculate_qparams` of the extrema of each 32, then `MXFP6PackedCompressor.compress`, with the preset MXFP6A16.
RECORDED = {
    torch.bfloat16: (
        "fa8475a6ec9fa89e1355f9dafa6697225fd9bd0364adeb621e03e8af2edd0691",
        "1a076fddfbad93058d6bbf66e1421f68cd0ce8d51b0775231a28b809662956d6",
    ),
    torch.float32: (
        "2c7470dcf1b5ec9077ac80ee5ca29804f5c5ba4842ab8d666b8912ff4e12258e",
        "80de29ff809ca95ccc8df5a45860812ec933954aaad1e5fccac5a937acb07c3c",
    ),
}


def plain(dtype):
    """`(48, 160)`: many magnitudes, ties of e2m3 in the first row, zeros of both signs in the second."""
    n = torch.arange(48 * 160)
    x = ((n * 7919 % 2003 - 1001) / 256 * torch.exp2((n // 32 * 5 % 41 - 20).float())).view(48, 160)
    x[0], x[1, ::2], x[1, 1::2] = (torch.arange(160) % 121 - 60) / 16, 0.0, -0.0
    return x.to(dtype)


def digest(t):
    return hashlib.sha256(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.fixture(params=RECORDED, ids=str)
def folder(request, tmp_path):
    """A checkpoint of one weight."""
    (tmp_path / "plain").mkdir()
    save_file({f"{Q}.weight": plain(request.param)}, tmp_path / "plain" / "model.safetensors")
    (tmp_path / "plain" / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path / "plain"


def made(folder, to, rule="contract"):
    out = folder.parent / f"{to} {rule}"
    manifest = convert(folder, out, to=to, rule=rule)
    return out, manifest, load_file(out / "model.safetensors")


def test_the_rule_writes_the_bytes_of_the_compressor(folder):
    out, _, tensors = made(folder, "ct_mxfp6", "compressed_tensors")
    assert {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()} == {
        f"{Q}.weight_packed": (torch.uint8, (48, 120)),
        f"{Q}.weight_scale": (torch.uint8, (48, 5)),
    }
    dtype = load_file(folder / "model.safetensors")[f"{Q}.weight"].dtype
    assert (digest(tensors[f"{Q}.weight_packed"]), digest(tensors[f"{Q}.weight_scale"])) == RECORDED[dtype]
    verdict = verify(out, folder)
    assert verdict.ok
    assert "compressed_tensors" in verdict.rules
    assert "contract" not in verdict.rules


def test_the_compressor_reads_what_bf16_holds(folder):
    library = pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    out, _, tensors = made(folder, "ct_mxfp6")
    _, _, want = made(out, "bf16")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    assert scheme.weights.num_bits == 6
    preset = library.quantization.preset_name_to_scheme("MXFP6A16", ["Linear"])
    assert scheme.weights.model_copy(update={"zp_dtype": preset.weights.zp_dtype}) == preset.weights
    stored = {name.rpartition(".")[2]: t for name, t in tensors.items()}
    read = BaseCompressor.get_value_from_registry(config["format"]).decompress(stored, scheme)["weight"]
    assert read.view(torch.int16).equal(want[f"{Q}.weight"].view(torch.int16))


def test_inspect_counts_codes_that_lie_across_bytes(folder):
    out, _, _ = made(folder, "ct_mxfp6")
    found = inspect(out)
    (group,) = found.groups
    assert (group.family.name, group.shape, group.grid) == ("ct_mxfp6", (48, 160), (48, 5))
    assert group.codes.count == 48 * 160
    assert group.codes.zero >= 160
    assert 0 < group.codes.saturated < 48 * 160
    assert group.codes.numbers == 64
    assert (found.exit_code, found.loaders["compressed-tensors"]) == (0, "yes")


def test_fp4_becomes_fp6_becomes_fp8_and_no_value_changes(folder):
    four, _, _ = made(folder, "ct_mxfp4")
    six, manifest, tensors = made(four, "ct_mxfp6")
    eight, _, _ = made(six, "ct_mxfp8")
    assert all(entry["lossless"] and entry["how"] == "kept" for entry in manifest["tensors"].values())
    assert tensors[f"{Q}.weight_scale"].equal(load_file(four / "model.safetensors")[f"{Q}.weight_scale"])
    assert str(verify(six, four)) == "1 equal"
    assert str(verify(eight, four)) == "1 equal"


def test_fp8_does_not_fit(folder):
    eight, _, _ = made(folder, "ct_mxfp8")
    with pytest.raises(CheckpointError, match="no lossless way from mxfp8 to mxfp6 is known"):
        made(eight, "ct_mxfp6")


def test_a_byte_more_in_a_row_is_refused(folder):
    out, _, tensors = made(folder, "ct_mxfp6")
    tensors[f"{Q}.weight_packed"] = torch.cat([tensors[f"{Q}.weight_packed"], torch.zeros(48, 1).byte()], 1)
    save_file(tensors, out / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"torch\.uint8 \(48, 121\) with .* is no scheme that convert knows"):
        convert(out, folder.parent / "b", to="bf16")


@pytest.mark.parametrize("to", ["ct_mxfp4", "ct_mxfp6", "mxfp8"])
def test_a_weight_with_a_part_of_a_block_is_copied_and_named(tmp_path, to):
    (tmp_path / "plain").mkdir()
    odd = "model.layers.0.mlp.down_proj.weight"
    weights = {f"{Q}.weight": plain(torch.bfloat16), odd: plain(torch.bfloat16)[:, :144].contiguous()}
    save_file(weights, tmp_path / "plain" / "model.safetensors")
    (tmp_path / "plain" / "config.json").write_text('{"model_type": "llama"}')
    manifest = convert(tmp_path / "plain", tmp_path / "out", to=to)
    named = f"1 weight is copied, the first is {odd}: K = 144 is no multiple of 32, the block size of {to}"
    assert named in manifest["warnings"]
    assert load_file(tmp_path / "out" / "model.safetensors")[odd].equal(weights[odd])
