"""Load checkpoints with transformers, and report what it says of their keys and the bytes of the weights.

As a program it prints the report as JSON: `python loading.py DIRECTORY...`. It does not use mxspec.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch


def dequantizing(directory):
    """The options of `from_pretrained` with which transformers dequantizes, whether or not there is a GPU."""
    from transformers import CompressedTensorsConfig, FineGrainedFP8Config, Mxfp4Config

    config = json.loads(Path(directory, "config.json").read_text()).get("quantization_config", {})
    match config.get("quant_method"):
        case "compressed-tensors":
            asked = CompressedTensorsConfig(dequantize=True)
        case "mxfp4":
            asked = Mxfp4Config(dequantize=True)
        case None:
            return {}
        case _:  # the argument's modules_to_not_convert replaces the file's
            plain = config.get("modules_to_not_convert")
            asked = FineGrainedFP8Config(dequantize=True, modules_to_not_convert=plain)
    return {"quantization_config": asked}


def load(directory):
    """The keys that transformers complains of, and the weights by name."""
    from transformers import AutoModelForCausalLM

    model, said = AutoModelForCausalLM.from_pretrained(
        directory, output_loading_info=True, dtype=torch.bfloat16, **dequantizing(directory)
    )
    keys = {
        name: sorted(map(str, said.get(name, ()))) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }
    return keys, {name: p.detach() for name, p in model.named_parameters()}


def digest(weight):
    """The dtype, the shape and the SHA-256 of a weight."""
    data = weight.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return [str(weight.dtype), list(weight.shape), hashlib.sha256(data).hexdigest()]


def report(directory):
    keys, weights = load(directory)
    return {"keys": keys, "weights": {name: digest(weight) for name, weight in weights.items()}}


if __name__ == "__main__":
    import transformers

    print(json.dumps({"version": transformers.__version__, "loaded": {d: report(d) for d in sys.argv[1:]}}))
