"""The cases of the ops as files, for whoever writes kernels without Python.

`export` writes, for each op that is judged byte for byte, `<op>.safetensors` with the tensors and `<op>.json`, a
manifest in the manner of Wycheproof; `check` judges what another program has written beside them. `FORMAT`, which
every manifest repeats, says what the bytes mean and where results go.
"""

from mxspec.vectors._export import FLAGS, FORMAT, VERSION, export, ops, output_names
from mxspec.vectors._judge import check, exported

__all__ = ["FLAGS", "FORMAT", "VERSION", "check", "export", "exported", "ops", "output_names"]
