"""Convert the layers of a plain checkpoint and save their codes, with the transformers that is installed.

As a program it prints the version and the digests as JSON: `python saving.py PLAIN RECIPE FAMILY DIRECTORY`.
"""

import json
import sys


def saved(plain, recipe, family, directory):
    import torch
    from transformers import AutoModelForCausalLM

    from mxspec.checkpoint import save
    from mxspec.nn import convert

    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    convert(model, recipe)
    return model, save(model, directory, to=family)


if __name__ == "__main__":
    import transformers

    manifest = saved(*sys.argv[1:])[1]
    print(json.dumps({"version": transformers.__version__, "tensors": manifest["tensors"]}))
