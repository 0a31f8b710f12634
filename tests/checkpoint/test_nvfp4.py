"""NVFP4: the bytes of ModelOpt and of compressed-tensors, tensor scales that are shared or inverted, MXFP4 as NVFP4.

`record_nvfp4.py` recorded the bytes with the libraries' own code.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mxspec import mx_grouped_gemm, nvfp4_dequantize, nvfp4_grouped_gemm, nvfp4_quantize
from mxspec.checkpoint import CheckpointError, NotLossless, convert, inspect, mxfp4_to_nvfp4, verify
from mxspec.checkpoint.fused import layer_of
from mxspec.checkpoint.nvfp4 import divisor_of, exponents
from mxspec.checkpoint.pairs import counted
from mxspec.checkpoint.verify import Finding, Verdict
from tests.checkpoint import record_nvfp4

E4M3, FP4 = torch.float8_e4m3fn, torch.float4_e2m1fn_x2
RECORDED = json.loads(record_nvfp4.RECORDED.read_text())
LAYER = "model.layers.0."
Q, K, V, OUT = (f"{LAYER}self_attn.{leaf}_proj" for leaf in "qkvo")
GATE, UP, DOWN = (f"{LAYER}mlp.{leaf}_proj" for leaf in ("gate", "up", "down"))
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def store(folder, tensors, config=None, files=(), **configs):
    """A directory with these tensors; those that are named in `files` lie in a second shard."""
    folder.mkdir()
    shards = {"model-00001-of-00002.safetensors": {}, "model-00002-of-00002.safetensors": {}} if files else {}
    if files:
        for name, x in tensors.items():
            shards[f"model-0000{1 + (name in files)}-of-00002.safetensors"][name] = x
        index = {"metadata": {}, "weight_map": {name: shard for shard, held in shards.items() for name in held}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for shard, held in (shards or {"model.safetensors": tensors}).items():
        save_file(held, folder / shard, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **(config or {})}))
    for name, value in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def loaded(folder):
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def same(a, b):
    return (
        a.dtype == b.dtype and a.shape == b.shape and a.view(-1).view(torch.uint8).equal(b.view(-1).view(torch.uint8))
    )


def random(n, k, scale=0.02, seed=0):
    return (torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


@pytest.fixture
def plain(tmp_path):
    return store(tmp_path / "plain", record_nvfp4.unpacked(RECORDED["plain"]))


@pytest.fixture
def modelopt(tmp_path):
    """What ModelOpt's `export_hf_checkpoint` wrote."""
    said = RECORDED["modelopt"]
    hf = said["configs"]["hf_quant_config.json"]
    tensors = record_nvfp4.unpacked(said["tensors"])
    return store(tmp_path / "modelopt", tensors, said["configs"]["config.json"], hf_quant_config=hf)


@pytest.fixture
def ct(tmp_path, plain):
    """What compressed-tensors compressed, beside the plain weights that it leaves."""
    said = RECORDED["compressed_tensors"]
    tensors = {name: x for name, x in loaded(plain).items() if not name.endswith("_proj.weight")}
    config = {"quantization_config": said["config"]}
    return store(tmp_path / "ct", {**tensors, **record_nvfp4.unpacked(said["tensors"])}, config)


@pytest.mark.parametrize(
    ("peer", "family", "rule", "count"),
    [("modelopt", "modelopt_nvfp4", "modelopt", 7), ("ct", "ct_nvfp4", "compressed_tensors", 7)],
)
def test_the_peers_own_bytes(request, plain, tmp_path, peer, family, rule, count):
    theirs, said = request.getfixturevalue(peer), RECORDED["modelopt" if peer == "modelopt" else rule]
    found = inspect(theirs)
    assert found.problems == []
    assert {group.family.name for group in found.groups} == {family}
    assert sum(group.weights for group in found.groups) == count
    assert not [trap for trap in found.traps if "fused layer" in trap.message]
    verdict = verify(theirs, plain)
    assert verdict.rules == (rule,)
    assert str(verdict) == f"5 equal, {count} made by a rule; the rule: {rule}"

    convert(plain, tmp_path / "ours", to=family, rule=rule)
    ours, want = loaded(tmp_path / "ours"), loaded(theirs)
    assert ours.keys() == {name for name in want if not name.endswith("input_scale")}
    assert [name for name in ours if not same(ours[name], want[name])] == []

    convert(theirs, tmp_path / "read", to="bf16")
    read = loaded(tmp_path / "read")
    assert {name: record_nvfp4.digest(read[name]) for name in said["read"]} == said["read"]
    if peer == "ct":
        config = json.loads((tmp_path / "ours" / "config.json").read_text())["quantization_config"]
        group = said["config"]["config_groups"]["group_0"]
        assert config["config_groups"]["group_0"] == {**group, "format": "nvfp4-pack-quantized"}


def test_the_configuration_of_modelopt(plain, modelopt, tmp_path):
    convert(modelopt, tmp_path / "same", to="modelopt_nvfp4")
    ours, theirs = loaded(tmp_path / "same"), loaded(modelopt)
    assert all(same(ours[name], theirs[name]) for name in theirs)
    for file, keys in (("hf_quant_config.json", ["quantization"]), ("config.json", ["quantization_config"])):
        want, got = (json.loads((folder / file).read_text()) for folder in (modelopt, tmp_path / "same"))
        for key in keys:
            want[key].pop("producer", None)
            assert got[key] == want[key]
    manifest = convert(plain, tmp_path / "weights", to="modelopt_nvfp4")
    config = json.loads((tmp_path / "weights" / "config.json").read_text())["quantization_config"]
    hf = json.loads((tmp_path / "weights" / "hf_quant_config.json").read_text())["quantization"]
    assert (config["quant_algo"], hf["quant_algo"], hf["group_size"]) == ("W4A16_NVFP4", "W4A16_NVFP4", 16)
    assert "input_activations" not in config["config_groups"]["group_0"]
    assert "only weights are quantized (W4A16)" in manifest["warnings"][1]


@pytest.mark.parametrize("family", ["ct_nvfp4", "modelopt_nvfp4"])
def test_the_contract_and_the_tensor_scale_of_a_layer(tmp_path, family):
    weights = {f"{name}.weight": random(192, 64, 0.01 * (i + 1), i) for i, name in enumerate((Q, K, V, OUT, GATE, UP))}
    source = store(tmp_path / "plain", weights, files=(f"{K}.weight", f"{UP}.weight"))
    manifest = convert(source, tmp_path / "made", to=family)
    made = loaded(tmp_path / "made")
    codes, second = (
        (".weight_packed", ".weight_global_scale") if family == "ct_nvfp4" else (".weight", ".weight_scale_2")
    )
    for layer in ((Q, K, V), (OUT,), (GATE, UP)):
        amax = torch.stack([weights[f"{name}.weight"].abs().amax() for name in layer]).amax().float()
        for name in layer:
            qdata, scale, tensor_scale = nvfp4_quantize(weights[f"{name}.weight"], amax)
            assert same(made[name + codes], qdata.view(torch.uint8))
            assert same(made[f"{name}.weight_scale"], scale)
            want = (2688 / amax).view(1) if family == "ct_nvfp4" else tensor_scale
            assert same(made[name + second], want)
            assert manifest["tensors"][name + codes]["tensor_scale"] == want.item()
    assert verify(tmp_path / "made", source).rules[0] == "contract"
    alone = convert(source, tmp_path / "alone", to=family, include=[f"{Q}*"])
    own = weights[f"{Q}.weight"].abs().amax().float()
    assert loaded(tmp_path / "alone")[Q + second].item() == (2688 / own if family == "ct_nvfp4" else own / 2688).item()
    assert alone["tensors"][f"{K}.weight"]["how"] == "copied"
    made[OUT + second] *= 2
    wrong = verify(store(tmp_path / "wrong", made), source)
    assert [f.name for f in wrong.findings if f.status == "differs"] == [OUT]


def test_modelopts_values_are_the_ops_up_to_one_rounding(modelopt, tmp_path):
    """The op rounds q * s * T once, ModelOpt's reader twice."""
    convert(modelopt, tmp_path / "read", to="bf16")
    stored, read = loaded(modelopt), loaded(tmp_path / "read")
    for name in (Q, DOWN):
        parts = stored[f"{name}.weight"].view(FP4), stored[f"{name}.weight_scale"], stored[f"{name}.weight_scale_2"]
        torch.testing.assert_close(nvfp4_dequantize(*parts), read[f"{name}.weight"], rtol=2**-8, atol=0)


def test_a_divisor_has_exactly_the_reciprocal_or_there_is_none():
    generator = torch.Generator().manual_seed(1)
    missing = 0
    for x in 1 + torch.rand(300, generator=generator):
        assert divisor_of(x.reciprocal()) is not None
        near = x.reciprocal().view(torch.int32) + torch.arange(-8, 9)
        exact = near.int().view(torch.float32)
        exact = exact[exact.reciprocal() == x]
        found = divisor_of(x)
        assert (found is not None) == bool(exact.numel())
        missing += found is None
        assert found is None or found in exact
    assert divisor_of(torch.tensor(2.0**-149)) is None
    assert 30 < missing < 80  # 17%: 1 - 2/m^2 of the mantissas m above the square root of 2


def test_from_compressed_tensors_to_modelopt_and_back(ct, tmp_path):
    manifest = convert(ct, tmp_path / "modelopt", to="modelopt_nvfp4")
    assert all(entry["lossless"] for entry in manifest["tensors"].values())
    old, new = loaded(ct), loaded(tmp_path / "modelopt")
    for name in (Q, GATE, DOWN):
        assert same(new[f"{name}.weight"], old[f"{name}.weight_packed"])
        assert same(new[f"{name}.weight_scale"], old[f"{name}.weight_scale"])
        assert same(new[f"{name}.weight_scale_2"], 1 / old[f"{name}.weight_global_scale"].reshape(()))
    assert str(verify(ct, tmp_path / "modelopt")) == "12 equal"
    convert(tmp_path / "modelopt", tmp_path / "back", to="ct_nvfp4")
    back = loaded(tmp_path / "back")
    assert back.keys() == old.keys()
    for name in (Q, GATE, DOWN):
        assert (1 / back[f"{name}.weight_global_scale"]).item() == new[f"{name}.weight_scale_2"].item()
    new[f"{OUT}.weight_scale_2"] = torch.nextafter(new[f"{OUT}.weight_scale_2"], torch.tensor(1.0))
    store(tmp_path / "wrong", new)
    assert [f.name for f in verify(ct, tmp_path / "wrong").findings if f.status != "equal"] == [OUT]


def test_values_that_the_two_readers_round_differently_are_counted(tmp_path):
    """q * fl(s / G) and q * fl(s * fl(1/G)) lie beside a middle between two numbers of bfloat16."""
    q, s = E2M1[1:8].float()[:, None, None], torch.arange(8, 127, dtype=torch.uint8).view(E4M3).float()[:, None]
    G = 1000 + torch.arange(40000).float() / 64
    differs = (q * (s / G)).bfloat16() != (q * (s * (1 / G))).bfloat16()
    code, scale, at = (int(i) for i in differs.nonzero()[0])
    tensors = {
        "a.weight_packed": torch.full((2, 8), 0x11 * (code + 1), dtype=torch.uint8),
        "a.weight_scale": torch.full((2, 1), scale + 8, dtype=torch.uint8).view(E4M3),
        "a.weight_global_scale": G[at : at + 1].clone(),
    }
    manifest = convert(store(tmp_path / "ct", tensors), tmp_path / "modelopt", to="modelopt_nvfp4")
    assert manifest["tensors"]["a.weight"]["bf16_values_that_differ"] == 32
    assert (
        "after the change, 32 values of 1 weight are other numbers of bfloat16, the first weight is a.weight_pac"
        in manifest["warnings"][2]
    )


def test_from_modelopt_to_compressed_tensors(modelopt, tmp_path):
    words = r"down_proj\.weight: no fp32 divisor has the reciprocal .*; --allow-lossy rounds the tensor scale"
    tensors = loaded(modelopt)
    tensors[f"{DOWN}.weight_scale_2"] = torch.tensor(2.888270864787046e-05)
    source = store(tmp_path / "none", tensors)
    with pytest.raises(CheckpointError, match=words):
        convert(source, tmp_path / "refused", to="ct_nvfp4", include=[f"{DOWN}*"])
    tensors[f"{DOWN}.weight_scale_2"] = torch.tensor(2.0**-15)
    tensors[f"{DOWN}.input_scale"] = torch.tensor(2.888270864787046e-05)
    words = r"down_proj\.input_scale: no fp32 divisor has the reciprocal .*; --allow-lossy rounds it"
    with pytest.raises(CheckpointError, match=words):
        convert(store(tmp_path / "inputs", tensors), tmp_path / "other", to="ct_nvfp4", include=[f"{DOWN}*"])
    tensors = loaded(source)
    manifest = convert(source, tmp_path / "ct", to="ct_nvfp4", allow_lossy=True)
    entry, made = manifest["tensors"][f"{DOWN}.weight_packed"], loaded(tmp_path / "ct")
    assert (entry["how"], entry["lossless"]) == ("rounded", False)
    assert "no fp32 divisor" in entry["why"]
    for name in (Q, DOWN):
        assert same(made[f"{name}.weight_packed"], tensors[f"{name}.weight"])
        assert same(made[f"{name}.weight_scale"], tensors[f"{name}.weight_scale"])
        for new, old in ((".weight_global_scale", ".weight_scale_2"), (".input_global_scale", ".input_scale")):
            assert made[name + new].shape == (1,)
            torch.testing.assert_close(1 / made[name + new], tensors[name + old].view(1), rtol=2**-23, atol=0)
    group = json.loads((tmp_path / "ct" / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    assert group["input_activations"]["dynamic"] == "local"
    assert not any("W4A16" in warning for warning in manifest["warnings"])
    assert manifest["warnings"] == [f"the tensor scale of 1 weight is rounded, the first is {DOWN}.weight"]
    assert manifest["tensors"][f"{Q}.weight_packed"]["how"] == "kept"
    manifest = convert(tmp_path / "inputs", tmp_path / "inputs_ct", to="ct_nvfp4", allow_lossy=True)
    assert manifest["warnings"] == [f"the scale of activations of 1 weight is rounded, the first is {DOWN}.weight"]
    assert manifest["tensors"][f"{DOWN}.weight_packed"]["how"] == "rounded"
    bf16 = convert(source, tmp_path / "bf16", to="bf16")
    assert "7 scales of activations are left out, the first is" in bf16["warnings"][0]


def values(codes, scale, width, tensor_scale=1.0):
    """Codes and scales in fp64."""
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()
    return E2M1[nibbles] * scale.double().repeat_interleave(width, 1) * float(tensor_scale)


def mxfp4_values(codes, scale):
    return values(codes, torch.exp2(scale.double() - 127), 32)


def kept(codes, scale, exponent=None):
    q, s, tensor_scale = mxfp4_to_nvfp4(codes, scale, exponent=exponent)
    assert (q.dtype, s.dtype, tensor_scale.shape) == (torch.uint8, E4M3, ())
    assert 2.0**-126 <= tensor_scale <= 2.0**126
    got, want = values(q, s, 16, tensor_scale), mxfp4_values(codes, scale)
    assert got.equal(want)
    assert got.signbit().equal(want.signbit())  # minus zero too
    return q, s, tensor_scale


@pytest.mark.parametrize("least", [0, 100, 237])
@pytest.mark.parametrize("shape", [(200, 320), (1, 32)])
def test_mxfp4_with_a_spread_of_17_keeps_its_codes(least, shape):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (shape[0], shape[1] // 2), generator=generator, dtype=torch.uint8)
    scale = torch.randint(least, least + 18, (shape[0], shape[1] // 32), generator=generator).byte()
    scale[0, 0], scale[-1, -1] = least + 17, least
    codes[0, 0] = codes[-1, -1] = 0x71
    q, s, _ = kept(codes, scale)
    assert least == 0 or q.equal(codes)  # the tensor scale 2^-126 is not below the normal numbers of fp32
    assert least == 0 or shape == (1, 32) or {s.float().amin().item(), s.float().amax().item()} == {2.0**-9, 256.0}


def test_a_larger_spread_needs_codes_that_allow_it():
    codes = torch.full((2, 16), 0x77, dtype=torch.uint8)  # 6.0: may be halved twice
    scale = torch.tensor([[140], [121]], dtype=torch.uint8)
    q, _, _ = kept(codes, scale)  # a spread of 19
    assert q[1].unique().tolist() == [0x33]  # 1.5
    scale[1] = 120
    found = mxfp4_to_nvfp4(codes, scale)
    assert isinstance(found, NotLossless)
    assert (found.blocks, found.failed, found.first) == (2, 1, (1, 0))
    assert "the exponents go from -7 to 13, a spread of 20" in found.why
    codes[0] = 0x33  # 1.5: may be doubled twice
    q, _, _ = kept(codes, scale)
    assert (q[0].unique().tolist(), q[1].unique().tolist()) == ([0x55], [0x33])  # 3.0 and 1.5
    codes[1, 9] = 0x71  # a 0.5 in the second half
    assert isinstance(mxfp4_to_nvfp4(codes, scale), NotLossless)
    codes[1, 8:] = 0x08  # zeros of both signs
    kept(codes, scale)


def test_zeros_have_any_exponent_and_a_nan_has_none():
    codes = torch.tensor([[0x80] * 16, [0x53] * 16], dtype=torch.uint8)
    for byte in (0, 254):
        q, _, _ = kept(codes, torch.tensor([[byte], [127]], dtype=torch.uint8))
        assert q.equal(codes)
    zeros = torch.full((2, 16), 0x08, dtype=torch.uint8)
    assert kept(zeros, torch.tensor([[3], [200]], dtype=torch.uint8))[2] == 1
    codes[0, 3] = 0x71
    found = mxfp4_to_nvfp4(codes, torch.tensor([[255], [127]], dtype=torch.uint8))
    assert (found.failed, found.first, found.why) == (1, (0, 0), "a byte 255 (NaN)")


def test_experts_have_a_tensor_scale_each_and_multiply_as_before():
    torch.manual_seed(0)
    codes = torch.randint(0, 256, (3, 8, 32), dtype=torch.uint8)
    of_expert = torch.tensor([0, 9, 4], dtype=torch.uint8)[:, None, None]
    scale = torch.randint(118, 130, (3, 8, 2), dtype=torch.uint8) + of_expert
    q, s, t = mxfp4_to_nvfp4(codes.view(torch.float4_e2m1fn_x2), scale.view(torch.float8_e8m0fnu))
    assert (q.dtype, len(t.unique())) == (torch.float4_e2m1fn_x2, 3)
    for e in range(3):
        alone = mxfp4_to_nvfp4(codes[e], scale[e])
        assert q[e].view(torch.uint8).equal(alone[0])
        assert s[e].view(torch.uint8).equal(alone[1].view(torch.uint8))
        assert t[e] == alone[2]
    x, offs = torch.randn(9, 64).bfloat16(), torch.tensor([2, 5, 9], dtype=torch.int32)
    mxfp4 = codes.view(q.dtype), scale.view(torch.float8_e8m0fnu)
    expected = mx_grouped_gemm(x, None, *mxfp4, offs, scale_layout="plain")
    assert nvfp4_grouped_gemm(x, None, torch.ones(3), q, s, t, offs, scale_layout="plain").equal(expected)

    scale[1, 4, 1], scale[2, 0, 0] = 255, 255
    found = mxfp4_to_nvfp4(codes, scale)
    assert (found.blocks, found.failed, found.first, found.why) == (48, 2, (1, 4, 1), "a byte 255 (NaN)")
    for wrong in (scale[0], scale[:2], scale[..., :1]):
        with pytest.raises(ValueError, match=r"codes are \(3, 8, 32\) and scale is .*; needs \(E, N, K/2\)"):
            mxfp4_to_nvfp4(codes, wrong)
    with pytest.raises(TypeError, match="scale is list; needs a tensor"):
        mxfp4_to_nvfp4(codes, scale.tolist())
    with pytest.raises(ValueError, match="with at least one expert and K a multiple of 32"):
        mxfp4_to_nvfp4(codes[:0], scale[:0])
    with pytest.raises(ValueError, match=r"Call codes\.flatten\(-2\) first"):
        mxfp4_to_nvfp4(codes.unflatten(-1, (2, 16)), scale)
    with pytest.raises(TypeError, match="exponent is True; needs an integer or None"):
        mxfp4_to_nvfp4(codes[0], scale[0], exponent=True)


@pytest.mark.parametrize("code", range(1, 8))
def test_each_code_may_be_doubled_and_halved_as_long_as_e2m1_has_the_value(code):
    codes, scale = torch.full((1, 16), 0x11 * code, dtype=torch.uint8), torch.tensor([[127]], dtype=torch.uint8)
    least, greatest, usual = exponents(codes, scale)
    assert usual == -8
    for t in range(-14, 15):
        shifts = [d for d in range(-9, 10) if E2M1[code] * 2.0**d in E2M1[1:8] and -9 <= -t - d <= 8]
        assert (
            bool(shifts)
            == (least <= t <= greatest)
            == (not isinstance(mxfp4_to_nvfp4(codes, scale, exponent=t), NotLossless))
        )
        if shifts:
            kept(codes, scale, t)


def test_a_shared_exponent_and_arguments_that_are_refused():
    codes, scale = torch.full((1, 16), 0x11, dtype=torch.uint8), torch.tensor([[127]], dtype=torch.uint8)  # 0.5
    assert exponents(codes, scale) == (-11, 9, -8)
    for t in range(-14, 12):
        assert isinstance(mxfp4_to_nvfp4(codes, scale, exponent=t), NotLossless) == (not -11 <= t <= 9)
    assert mxfp4_to_nvfp4(codes, scale.view(torch.float8_e8m0fnu))[2] == 2.0**-8
    with pytest.raises(ValueError, match="exponent is 127; needs a number from -126 to 126"):
        mxfp4_to_nvfp4(codes, scale, exponent=127)
    with pytest.raises(TypeError, match=r"exponent is 1\.5; needs an integer or None"):
        mxfp4_to_nvfp4(codes, scale, exponent=1.5)
    with pytest.raises(ValueError, match=r"needs \(N, K/2\) and \(N, K/32\)"):
        mxfp4_to_nvfp4(codes, torch.zeros(1, 2, dtype=torch.uint8))


def mxfp4(folder, scales, **more):
    """MXFP4 weights of compressed-tensors, with these bytes as the scales of two rows."""
    tensors = {}
    for i, (name, bytes_) in enumerate(scales.items()):
        generator = torch.Generator().manual_seed(i)
        codes = torch.randint(0, 256, (2, 16), generator=generator, dtype=torch.uint8)
        codes[:, 0], codes[:, 8] = 0x71, 0x71
        tensors |= {
            f"{name}.weight_packed": codes,
            f"{name}.weight_scale": torch.tensor([bytes_], dtype=torch.uint8).mT,
        }
    return store(folder, {name: x.contiguous() for name, x in tensors.items()}, **more)


@pytest.mark.parametrize("family", ["ct_nvfp4", "modelopt_nvfp4"])
def test_mxfp4_weights_of_a_layer_share_a_power_of_two(tmp_path, family):
    source = mxfp4(tmp_path / "mx", {Q: (120, 110), K: (118, 126), V: (109, 111), OUT: (90, 91)})
    manifest = convert(source, tmp_path / "nv", to=family)
    assert all(entry["lossless"] and entry["how"] == "kept" for entry in manifest["tensors"].values())
    made = loaded(tmp_path / "nv")
    end = ".weight_global_scale" if family == "ct_nvfp4" else ".weight_scale_2"
    sign = -1 if family == "ct_nvfp4" else 1
    for name, exponent in ((Q, -9), (K, -9), (V, -9), (OUT, -44)):
        assert made[name + end].item() == 2.0 ** (sign * exponent)
    assert str(verify(source, tmp_path / "nv")) == "4 equal"
    assert not any("fused" in warning for warning in manifest["warnings"])


def test_mxfp4_weights_of_a_layer_keep_their_codes_if_they_can(tmp_path):
    halves = torch.full((2, 16), 0x11, dtype=torch.uint8)  # 0.5 may be doubled three times
    tensors = {}
    for name, byte in ((Q, 120), (K, 126)):
        tensors |= {f"{name}.weight_packed": halves.clone()}
        tensors |= {f"{name}.weight_scale": torch.full((2, 1), byte, dtype=torch.uint8)}
    convert(store(tmp_path / "mx", tensors), tmp_path / "nv", to="modelopt_nvfp4")
    made = loaded(tmp_path / "nv")
    for name in (Q, K):
        assert made[f"{name}.weight"].equal(halves)
        assert made[f"{name}.weight_scale_2"].item() == 2.0**-9


def test_mxfp4_that_cannot_be_kept_says_why(tmp_path):
    source = mxfp4(tmp_path / "one", {OUT: (100, 120)})
    with pytest.raises(CheckpointError, match=r"o_proj\.weight_packed: 1 of 2 blocks would change.* a spread of 20"):
        convert(source, tmp_path / "out", to="ct_nvfp4")
    source = mxfp4(tmp_path / "three", {Q: (100, 100), K: (120, 120), V: (110, 110)})
    words = "engines fuse .*q_proj.*k_proj.*v_proj.*, and no tensor scale keeps the values of all"
    with pytest.raises(CheckpointError, match=words):
        convert(source, tmp_path / "out3", to="modelopt_nvfp4")
    manifest = convert(source, tmp_path / "lossy", to="modelopt_nvfp4", allow_lossy=True)
    entries = [manifest["tensors"][f"{name}.weight"] for name in (Q, K, V)]
    assert {(e["how"], e["lossless"], e["rule"]) for e in entries} == {("quantized again", False, "contract")}
    assert [entry["tensor_scale"] for entry in entries] == [(torch.tensor(6 * 2.0**-7) / 2688).item()] * 3
    assert all("engines fuse" in entry["why"] for entry in entries)


def test_a_layer_with_several_tensor_scales_is_said(ct, tmp_path):
    tensors = loaded(ct)
    tensors[f"{K}.weight_global_scale"] *= 2
    source = store(tmp_path / "several", tensors, {"quantization_config": {"quant_method": "compressed-tensors"}})
    (trap,) = [trap for trap in inspect(source).traps if "fused layer" in trap.message]
    assert (trap.loaders, trap.effect, trap.weights, trap.first) == (("vLLM", "SGLang"), "reads wrong", 3, Q)
    assert inspect(source).loaders["vLLM"] == "reads wrong"
    manifest = convert(source, tmp_path / "modelopt", to="modelopt_nvfp4")
    said = f"1 fused layer has several tensor scales, the first is {Q}, {K}, {V}: vLLM and SGLang"
    assert any(warning.startswith(said) for warning in manifest["warnings"])
    served = {f.name: f.status for f in verify(source, source, as_loaded="vllm").findings}
    assert [name for name, status in served.items() if status != "equal"] == [Q, V]


@pytest.mark.parametrize("name", ["experts.w13", "mlp.experts.gate_up_proj", "experts.weight"])
def test_a_plain_stack_of_experts_is_named(tmp_path, name):
    stack = random(4 * 32, 64).view(4, 32, 64)
    words = r"experts.* in model\.safetensors is a stack of matrices \(4, 32, 64\), and ct_nvfp4 has no names"
    with pytest.raises(CheckpointError, match=words):
        convert(store(tmp_path / "alone", {name: stack}), tmp_path / "refused", to="ct_nvfp4")
    both = store(tmp_path / "both", {name: stack, "a.weight": random(4, 64), "conv1d.weight": random(64, 4)[:, None]})
    manifest = convert(both, tmp_path / "out", to="ct_nvfp4")
    assert manifest["tensors"][name]["how"] == "copied"
    (said,) = [warning for warning in manifest["warnings"] if "stack" in warning]
    assert said.startswith(f"1 stack of matrices is copied, the first is {name}: ct_nvfp4 has")
    manifest = convert(both, tmp_path / "excluded", to="ct_nvfp4", exclude=["*experts*"])
    assert not any("stack" in warning for warning in manifest["warnings"])


def test_numbers_and_words_agree():
    assert counted(1, "weight", "have") == "1 weight has"
    assert counted(0, "weight", "have") == "0 weights have"
    assert counted(2, "scale of activations", "are") == "2 scales of activations are"
    assert counted(1, "scale of activations", "are") == "1 scale of activations is"
    findings = [Finding(str(i), status) for i, status in enumerate(["equal", "differs", "differs"])]
    assert str(Verdict(findings)) == "1 equal, 2 differ"
    assert str(Verdict(findings[:2])) == "1 equal, 1 differs"


def nvfp4(name="a.b", n=4, k=32, second=1.0):
    codes = torch.full((n, k // 2), 0x22, dtype=torch.uint8)
    tensors = {f"{name}.weight": codes, f"{name}.weight_scale": torch.ones(n, -(-k // 16)).to(E4M3)}
    return tensors if second is None else {**tensors, f"{name}.weight_scale_2": torch.tensor(second)}


def put(x, value, *places):
    for place in places:
        x[place] = value
    return x


STACK = {"a.weight": torch.zeros(2, 4, 16, dtype=torch.uint8), "a.weight_scale": torch.ones(2, 4, 2).to(E4M3)}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (nvfp4(k=24), r"a\.b\.weight in model\.safetensors: K = 24 is no multiple of 16"),
        (
            nvfp4(second=None),
            r"a\.b\.weight in model\.safetensors has no scale of the whole tensor; needs a\.b\.weight_sc",
        ),
        (nvfp4(second=0.0), r"a\.b\.weight_scale_2 in model\.safetensors is 0\.0; needs a positive finite number"),
        (nvfp4(second=float("nan")), r"weight_scale_2 in model\.safetensors is nan"),
        (nvfp4(second=[1.0, 2.0]), r"weight_scale_2 in model\.safetensors: torch\.float32 \(2,\); needs one float32"),
        (nvfp4() | {"a.b.weight_scale_2": torch.ones(()).half()}, r"torch\.float16 \(\); needs one float32"),
        (nvfp4() | {"a.b.weight_scale": torch.ones(4, 4).to(E4M3)}, r"weight_scale is \(4, 4\); .* needs \(4, 2\)"),
        (
            nvfp4() | {"a.b.weight_scale": torch.ones(4, 2)},
            r"a\.b\.weight_scale in model\.safetensors: torch\.float32 \(4, 2\); NVFP4 needs torch\.float8_e4m3fn",
        ),
        (
            {"a.weight": random(4, 32).double()},
            r"no weight of .* is to be changed; a\.weight in model\.safetensors is torch\.float64; convert quantizes",
        ),
        (nvfp4() | {"a.b.pre_quant_scale": torch.ones(32)}, r"a\.b\.weight in .* comes with a\.b\.pre_quant_scale"),
        (STACK, r"a\.weight: shape \(2, 4, 16\) is a stack of experts; convert reads a tensor for each expert"),
        ({"a.weight_scale_2": torch.ones(())}, r"a\.weight_scale_2 in model\.safetensors: scales without"),
        (
            {"a.weight_packed": torch.zeros(4, 8, dtype=torch.uint8)},
            r"a\.weight_packed in model\.safetensors: codes without",
        ),
        (
            nvfp4("c") | {"c.input_scale": torch.tensor(1.0)} | nvfp4("d"),
            r"c\.weight has c\.input_scale, and d\.weight has no input scale",
        ),
        (
            {"a.b.weight": random(4, 24)},
            r"a\.b\.weight in model\.safetensors: K = 24 is no multiple of 16; .*--exclude",
        ),
        (
            {"a.b.weight": put(random(300, 32), torch.nan, (131, 7), (299, 0))},
            r"a\.b\.weight in model\.safetensors: 2 values are NaN or Inf, the first is \(131, 7\); needs finite",
        ),
        (
            {"a.b.weight": put(random(4, 32), -torch.inf, (3, 31))},
            r"a\.b\.weight in model\.safetensors: 1 value is NaN or Inf, the first is \(3, 31\); needs finite numbers",
        ),
        ({"a.b.weight": torch.full((4, 32), 1e-37)}, r"a\.b\.weight: the largest magnitude is .* would be inf"),
        ({f"{Q}.weight": random(4, 32), f"{K}.weight": random(4, 32).float()}, "q_proj.* and NVFP4 needs one tensor"),
    ],
)
def test_refusals(tmp_path, tensors, words):
    source = store(tmp_path / "source", tensors)
    with pytest.raises(CheckpointError, match=words):
        convert(source, tmp_path / "out", to="ct_nvfp4", allow_lossy=True)


def test_what_else_is_refused_or_said(plain, modelopt, tmp_path):
    with pytest.raises(ValueError, match="ct_nvfp4 has no scales 'ue8m0'; needs e4m3"):
        convert(plain, tmp_path / "out", to="ct_nvfp4", scales="ue8m0")
    with pytest.raises(ValueError, match="'deepseek' does not quantize to nvfp4"):
        convert(plain, tmp_path / "out", to="ct_nvfp4", rule="deepseek")
    with pytest.raises(CheckpointError, match=r"down_proj\.weight: no lossless way from nvfp4 to mxfp8 is known"):
        convert(modelopt, tmp_path / "mx", to="mxfp8", include=[f"{DOWN}*"])
    lossy = convert(modelopt, tmp_path / "lossy", to="mxfp8", allow_lossy=True)
    assert "7 scales of activations are left out" in lossy["warnings"][-1]
    hf = json.loads((modelopt / "hf_quant_config.json").read_text())
    hf["quantization"]["kv_cache_quant_algo"] = "FP8"
    (modelopt / "hf_quant_config.json").write_text(json.dumps(hf))
    manifest = convert(modelopt, tmp_path / "cache", to="modelopt_nvfp4")
    assert "the source quantizes the KV cache (kv_cache_quant_algo 'FP8'" in manifest["warnings"][-1]
    assert "7 of the plain tensors are scales of activations" in inspect(modelopt).notes[-1]
    rotated = {"quantization_config": {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {}}}}
    source = store(tmp_path / "rotated", loaded(plain), rotated)
    assert "transform_config" in convert(source, tmp_path / "out", to="modelopt_nvfp4")["warnings"][-1]
    odd = store(tmp_path / "odd", nvfp4(k=24))
    assert [p.message for p in inspect(odd).problems if p.kind == "grid"] == [
        "has K = 24, which is no multiple of 16; NVFP4 has blocks of 16"
    ]


@pytest.mark.parametrize(
    ("peer", "codes", "second"),
    [("ct", "weight_packed", "weight_global_scale"), ("modelopt", "weight", "weight_scale_2")],
)
def test_a_missing_block_scale_is_named_beside_a_tensor_scale(request, tmp_path, peer, codes, second):
    tensors = loaded(request.getfixturevalue(peer))
    del tensors[f"{Q}.weight_scale"]
    source = store(tmp_path / "source", tensors, files=(f"{K}.{codes}",))
    words = f"{Q}.{codes} in model-00001-of-00002.safetensors: has no block scale; needs {Q}.weight_scale"
    with pytest.raises(CheckpointError) as raised:
        convert(source, tmp_path / "out", to="bf16")
    assert str(raised.value) == words
    with pytest.raises(CheckpointError) as raised:
        verify(source, source)
    assert str(raised.value) == words
    said = [(p.kind, p.where, p.message) for p in inspect(source).problems if p.where.startswith(Q)]
    assert said == [("missing scale", f"{Q}.{codes}", f"has U8 codes and no block scale; needs {Q}.weight_scale")]
    tensors[f"{Q}.scales_of_blocks"] = torch.ones(2)
    renamed = [p for p in inspect(store(tmp_path / "renamed", tensors)).problems if p.where == f"{Q}.{codes}"]
    assert [(p.kind, p.message) for p in renamed] == [
        ("renamed scale", f"has U8 codes, and no family has a scale with the name {Q}.scales_of_blocks")
    ]


SCALE = f"{LAYER}a.weight_scale"
E4M3_SCALE = torch.ones(256, 8).to(E4M3)


@pytest.mark.parametrize(
    ("scale", "second", "kind", "words"),
    [
        (E4M3_SCALE, True, "grid", "is U8 [256, 128], and {} is F8_E4M3 [256, 8]; needs [256, 16] ({})"),
        (E4M3_SCALE, False, "grid", "is U8 [256, 128], and {} is F8_E4M3 [256, 8]; needs [256, 16] ({})"),
        (torch.ones(256, 8), True, "grid", "is U8 [256, 128], and {} is F32 [256, 8]; needs [256, 16] ({})"),
        (torch.ones(256, 16), True, "dtype of scale", "{} is F32 [256, 16]; {} needs F8_E4M3"),
        (torch.ones(256, 8), False, "dtype of scale", "{} is F32 [256, 8]; {} needs U8: was a byte cast to a number?"),
    ],
)
@pytest.mark.parametrize("maker", ["ct", "modelopt"])
def test_block_scales_that_do_not_fit(tmp_path, maker, scale, second, kind, words):
    codes, end = ("weight_packed", "weight_global_scale") if maker == "ct" else ("weight", "weight_scale_2")
    tensors = {f"{LAYER}a.{codes}": torch.full((256, 128), 0x22, dtype=torch.uint8), SCALE: scale}
    tensors |= {f"{LAYER}a.{end}": torch.ones(1)} if second else {}
    (problem,) = inspect(store(tmp_path / "source", tensors)).problems
    family = f"{maker}_mxfp4" if words.endswith("number?") else f"{maker}_nvfp4"
    assert (problem.kind, problem.where, problem.message) == (kind, f"{LAYER}a.{codes}", words.format(SCALE, family))


@pytest.mark.parametrize("family", ["modelopt_nvfp4", "ct_nvfp4", "bf16"])
def test_a_nan_among_the_block_scales_is_refused(ct, tmp_path, family):
    tensors = loaded(ct)
    scale = tensors[f"{DOWN}.weight_scale"]
    scale.view(torch.uint8)[1, 2], scale.view(torch.uint8)[3, 0] = 0x7F, 0xFF
    source = store(tmp_path / "source", tensors, files=(f"{DOWN}.weight_scale",))
    words = (
        f"{DOWN}.weight_scale in model-00002-of-00002.safetensors: 2 of {scale.numel()} scales are NaN, the first is"
    )
    with pytest.raises(CheckpointError) as raised:
        convert(source, tmp_path / "out", to=family, allow_lossy=True)
    assert str(raised.value) == f"{words} (1, 2); needs numbers"
    assert verify(source, source).ok  # verify compares the bits of a NaN


@pytest.mark.parametrize("family", ["modelopt_nvfp4", "ct_nvfp4", "bf16"])
def test_a_negative_block_scale_is_refused(tmp_path, family):
    """-0 is the scale 0, also to tensor cores, which read no sign."""
    tensors = nvfp4()
    tensors["a.b.weight_scale"].view(torch.uint8)[2, 1] = 0x80
    convert(store(tmp_path / "zero", tensors), tmp_path / "kept", to=family, allow_lossy=True)
    tensors["a.b.weight_scale"].view(torch.uint8)[1, 1] = 0xB8
    with pytest.raises(CheckpointError, match=r"weight_scale in .*: 1 of 8 scales are negative, the first is \(1, 1\)"):
        convert(store(tmp_path / "source", tensors), tmp_path / "out", to=family, allow_lossy=True)


@pytest.mark.parametrize(
    ("second", "has"),
    [(torch.ones(1), None), (torch.ones(()), None), (torch.ones(1).bfloat16(), "BF16 [1]"), (torch.ones(4), "F32 [4]")],
    ids=str,
)
def test_inspect_reads_the_form_of_a_tensor_scale(tmp_path, second, has):
    source = store(tmp_path / "source", nvfp4() | {"a.b.weight_scale_2": second})
    found = [(p.where, p.message) for p in inspect(source).problems if p.kind == "scale of the tensor"]
    assert found == ([("a.b.weight_scale_2", f"is {has}; needs one number of F32")] if has else [])


def test_inspect_names_the_dtype_of_codes_that_a_family_needs(tmp_path):
    held = nvfp4()
    codes, scale = held["a.b.weight"].view(torch.int8), held["a.b.weight_scale"]
    tensors = {"a.weight_packed": codes, "a.weight_scale": scale, "a.weight_global_scale": torch.ones(1)}
    (problem,) = inspect(store(tmp_path / "source", tensors)).problems
    assert (problem.kind, problem.where) == ("dtype of codes", "a.weight_packed")
    assert problem.message == "has I8 codes beside a.weight_scale; needs U8 codes"


def test_a_weight_of_another_dtype_is_copied_and_said(tmp_path):
    tensors = {"a.weight": random(4, 32), "b.weight": random(4, 32).double()}
    manifest = convert(store(tmp_path / "source", tensors), tmp_path / "out", to="ct_nvfp4")
    (said,) = [warning for warning in manifest["warnings"] if "float64" in warning]
    assert said.startswith("1 weight is copied, the first: b.weight in model.safetensors is torch.float64; convert")


@pytest.mark.parametrize("rule", ["contract", "modelopt", "compressed_tensors"])
@pytest.mark.parametrize("family", ["ct_nvfp4", "modelopt_nvfp4"])
def test_a_matrix_of_zeros_has_the_tensor_scale_1(tmp_path, family, rule):
    zeros = torch.zeros(4, 32).bfloat16()
    zeros[1, 3] = -0.0
    source = store(tmp_path / "zeros", {"a.weight": zeros})
    manifest = convert(source, tmp_path / "out", to=family, rule=rule)
    assert {entry.get("tensor_scale") for entry in manifest["tensors"].values()} == {1.0}
    assert str(verify(tmp_path / "out", source)) == "1 equal"


def test_an_expert_is_a_layer_of_its_own():
    head = "model.layers.0.mlp.experts.3"
    assert layer_of(f"{head}.w1") == (f"{head}.w1", f"{head}.w3")
    assert layer_of(f"{head}.down_proj") == (f"{head}.down_proj",)
    assert layer_of("up_proj") == ("gate_proj", "up_proj")
