"""zero_unused_: write zeros where a grouped matmul writes nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.reference.common import checks
from mxspec.spec import spec


def check_args(x: Tensor, offs: Tensor) -> None:
    op = "zero_unused_"
    checks.tensor_dtype(op, "x", x, checks.FLOAT_DTYPES)
    checks.rank(op, "x", x, (2, 3))
    checks.offsets(op, "offs", offs, ("x", x))
    if x.ndim == 3:
        checks.shape(op, "offs", offs, (x.shape[0],), f"for the {x.shape[0]} matrices of x")
    checks.rows_apart(op, "x", x)


@spec(
    check_args=check_args,
    # counts every row or matrix as unused, because the host does not read offs
    bytes_moved=lambda args, outputs: args[0].nbytes + args[1].nbytes,
)
def zero_unused_(x: Tensor, offs: Tensor) -> None:
    """Write zeros into the parts of a grouped matmul's result that belong to no token, in place.

    Let G be the number of groups. A 2-D x has a row for each token: `x[m] = 0` for each row m with `m >= offs[G-1]`,
    and for every row if G = 0. A 3-D x has a matrix for each group: `x[g] = 0` for each group g with
    `offs[g] <= offs[g-1]`, where `offs[-1]` is 0. No other element changes. PyTorch's grouped matmul leaves these rows
    of its output, and these matrices of a weight's gradient, uninitialized. The kernels write the zeros and nothing
    else, so a call without unused rows or matrices takes only the time of a launch.

    Args:
        x: `(M, K)` or `(G, N, K)`; bfloat16, float16 or float32; each row is contiguous: `stride(-1) = 1`. Rows and
            matrices may lie any distance apart that keeps them from overlapping. Kernels are fastest if x and each of
            its rows begin at a multiple of 16 bytes.
        offs: `(G,)` int32 on x's device, any stride: the exclusive end of each group, counted in tokens. Any number is
            allowed, and none leads to an access outside x. For a 2-D x, only the last end matters: from M on, no row is
            unused; at 0 or below, every row is. For a 3-D x, a group that ends before it begins has no tokens.

    Returns:
        None. The zeros are +0.

    Special values: NaN, Inf and -0 in an unused row or matrix become +0. All other bits stay.

    Raises:
        TypeError: x or offs has a dtype that is not listed above.
        ValueError: a rank, a shape or a device is not as above; x has rows that are not contiguous, or rows or matrices
            that overlap; or x is a negated view (`is_neg()`).
        RuntimeError: x requires a gradient while gradients are enabled; this op has no gradient.

    Example:
        >>> tokens = torch.tensor([[1.0, 2.0], [3.0, 4.0], [float("nan"), 5.0]])
        >>> zero_unused_(tokens, torch.tensor([1, 1, 2], dtype=torch.int32))
        >>> tokens.tolist()
        [[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]]
        >>> weights = torch.tensor([[[1.0, 2.0]], [[float("nan"), 3.0]], [[4.0, 5.0]]])
        >>> zero_unused_(weights, torch.tensor([1, 1, 2], dtype=torch.int32))
        >>> weights.tolist()
        [[[1.0, 2.0]], [[0.0, 0.0]], [[4.0, 5.0]]]

    Source: mxspec, for the elements that PyTorch's `torch.nn.functional.grouped_mm` does not write.
    """
    check_args(x, offs)
    ends = torch.cat([offs.new_zeros(1), offs])  # the end of each group, after a 0
    if x.ndim == 2:
        x.masked_fill_((torch.arange(x.shape[0], device=x.device) >= ends[-1])[:, None], 0)
    else:
        x.masked_fill_((ends[1:] <= ends[:-1])[:, None, None], 0)
