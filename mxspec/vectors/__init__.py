"""The cases of the ops as files, for people who write kernels without Python.

`export` writes two files for each op that is judged byte for byte: `<op>.safetensors` with the tensors and `<op>.json`,
a manifest in the style of Wycheproof. `check` judges the results that another program has written beside them. Every
manifest contains `FORMAT`, which says what the bytes mean and where results go.
"""

from mxspec.vectors._export import FLAGS, FORMAT, VERSION, export, ops, output_names
from mxspec.vectors._judge import check, exported

__all__ = ["FLAGS", "FORMAT", "VERSION", "check", "export", "exported", "ops", "output_names"]
