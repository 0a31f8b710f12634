"""Write NVFP4 checkpoints of a tiny Llama with the code of ModelOpt and of compressed-tensors, and record their bytes.

As a program it writes `nvfp4_recorded.json` beside itself. It needs nvidia-modelopt 0.47.0, compressed-tensors 0.20.0
and transformers 5.23.0, and runs on a CPU. It does not use mxspec.

ModelOpt's checkpoint is that of `export_hf_checkpoint` after `mtq.quantize(model, NVFP4_DEFAULT_CFG)`. The bytes of
compressed-tensors are those of `generate_gparam`, `calculate_qparams` and `NVFP4PackedCompressor.compress`, from
extrema in bfloat16, and with the smallest global scale of a fused layer, as llm-compressor takes it. The digests are
those of the bfloat16 values that each library reads back.
"""

import base64
import hashlib
import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8}
RECORDED = Path(__file__).with_name("nvfp4_recorded.json")


def packed(tensors):
    names = {dtype: name for name, dtype in DTYPES.items()}
    return {
        name: [
            names[x.dtype],
            list(x.shape),
            base64.b64encode(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).decode(),
        ]
        for name, x in sorted(tensors.items())
    }


def unpacked(stored):
    """The tensors of an entry of the file."""
    return {
        name: torch.frombuffer(bytearray(base64.b64decode(data)), dtype=torch.uint8).view(DTYPES[dtype]).view(shape)
        for name, (dtype, shape, data) in stored.items()
    }


def digest(values):
    """The SHA-256 of bfloat16 values. ModelOpt reads the code of -0 as +0, so a zero has no sign here."""
    return hashlib.sha256((values + 0.0).contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def of_modelopt(folder):
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import NVFP4QTensor
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 16, "max_position_embeddings": 32}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16}
    config = LlamaConfig(num_hidden_layers=1, **sizes, **heads)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "plain")
    mtq.quantize(model, mtq.NVFP4_DEFAULT_CFG, lambda m: m(torch.arange(16)[None]))
    with torch.inference_mode():
        export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=folder / "modelopt")
    plain, made = (load_file(folder / name / "model.safetensors") for name in ("plain", "modelopt"))
    read = {}
    for name, x in made.items():
        if x.dtype == torch.uint8:
            stored = NVFP4QTensor(plain[name].shape, torch.bfloat16, x)
            scales = {"scale": made[f"{name}_scale"], "double_scale": made[f"{name}_scale_2"]}
            read[name] = digest(stored.dequantize(torch.bfloat16, block_sizes={-1: 16}, **scales))
    configs = {
        name: json.loads((folder / "modelopt" / name).read_text()) for name in ("config.json", "hf_quant_config.json")
    }
    return plain, {"tensors": packed(made), "read": read, "configs": configs}


def of_compressed_tensors(plain):
    from compressed_tensors.compressors import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    weights = {name: x for name, x in plain.items() if name.endswith("_proj.weight")}
    divisors = {name: generate_gparam(x.amin(), x.amax()) for name, x in weights.items()}
    made, read = {}, {}
    for name, x in weights.items():
        module = name.removesuffix(".weight")
        head, _, leaf = module.rpartition(".")
        layer = next((leaves for leaves in FUSED if leaf in leaves), (leaf,))
        divisor = min(divisors[f"{head}.{other}.weight"] for other in layer)
        blocks = x.unflatten(1, (-1, 16))
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=divisor)
        state = {"weight": x, "weight_scale": scale, "weight_global_scale": divisor}
        state = NVFP4PackedCompressor.compress(state, scheme)
        made |= {f"{module}.{key}": value for key, value in state.items()}
        read[name] = digest(NVFP4PackedCompressor.decompress(state, scheme)["weight"])
    config = QuantizationConfig(config_groups={"group_0": scheme}, format="nvfp4-pack-quantized", ignore=["lm_head"])
    return {"tensors": packed(made), "read": read, "config": config.model_dump(mode="json")}


def main():
    with tempfile.TemporaryDirectory() as folder:
        plain, modelopt = of_modelopt(Path(folder))
    entries = {"plain": packed(plain), "modelopt": modelopt, "compressed_tensors": of_compressed_tensors(plain)}
    RECORDED.write_text(json.dumps(entries, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
