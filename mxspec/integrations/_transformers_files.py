"""The files that transformers writes of a model: the names and cuts of the tensors, and the configurations.

`mxspec.checkpoint.save` takes them from transformers' own functions, which `save_pretrained` calls too. These functions
are private in transformers. They are the same in 5.17.0 and 5.23.0.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor


def without_ties(model: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict that files hold: without a second name of a tied weight, and without keys that are not saved."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    return remove_tied_weights_from_state_dict({name: x for name, x in state.items() if name not in ignored}, model)


def named_as_files(model: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a model by the names of its files, cut as its files hold them: `save_pretrained` calls the same.

    A model that was loaded from a quantized checkpoint has conversions that would quantize it again. They are left out.
    """
    from transformers.core_model_loading import revert_weight_conversion

    own, kept = vars(model), {}
    operations = [op for each in own.get("_weight_conversions") or () for op in getattr(each, "operations", ())]
    if any(type(op).__module__.startswith("transformers.integrations.") for op in operations):  # of a quantizer
        kept["_weight_conversions"] = own.pop(
            "_weight_conversions"
        )  # then the conversions of the model's class are used
    try:
        return dict(revert_weight_conversion(model, dict(state)))
    finally:
        own.update(kept)


def configurations(model: Any) -> dict[str, dict[str, Any]]:
    """The files `config.json` and, for a model that generates, `generation_config.json`. The model stays as it is."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(model.dtype).removeprefix("torch.")
    found = {"config.json": json.loads(config.to_json_string())}
    found["config.json"].pop("quantization_config", None)
    if model.can_generate() and model.generation_config is not None:
        found["generation_config.json"] = json.loads(model.generation_config.to_json_string())
    return found
