"""hadamard_16: a Hadamard transform of each 16 elements, which spreads outliers before a quantizer."""

from __future__ import annotations

import torch
from torch import Tensor

from mxspec.reference.common import checks
from mxspec.spec import per_element, spec

SIZE = 16
SIGNS = 0xD7E8  # TransformerEngine, `get_wgrad_sign_vector`: + + + - + - - - - - - + - + - -


def check_args(x: Tensor, *, axis: int = -1, signs: int = SIGNS) -> None:
    op = "hadamard_16"
    checks.tensor_dtype(op, "x", x, checks.FLOAT_DTYPES)
    checks.rank(op, "x", x, (2, 3))
    checks.choice(op, "axis", axis, (-1, -2))
    name = "K" if axis == -1 else "M" if x.ndim == 2 else "N"
    checks.multiple(op, name, x.shape[axis], SIZE, of="")
    check_signs(op, signs)


def check_signs(op: str, signs: int, more: str = "") -> None:
    """Check a mask of the signs of 16 elements."""
    if isinstance(signs, bool) or not isinstance(signs, int):
        raise TypeError(f"{op}: signs = {signs!r}; needs an integer, a mask of 16 bits{more}")
    if not 0 <= signs < 2**SIZE:
        raise ValueError(f"{op}: signs = {signs:#x}; needs a mask of 16 bits{more}")


@spec(check_args=check_args, flops=per_element(5))  # four stages and a factor; a sign is no operation
def hadamard_16(x: Tensor, *, axis: int = -1, signs: int = SIGNS) -> Tensor:
    """Change the signs of some elements, then transform each 16 consecutive elements along `axis` by Hadamard's matrix.

    Sixteen elements v become `H (s * v) / 4`. `H` is Sylvester's matrix: row i and column j of `H` have the sign
    `(-1)^popcount(i & j)`. `s` is the vector of signs. The transform is orthonormal: the transpose of `H * s / 4` is
    its inverse, and `H` is symmetric. So `sum(a * b)` over the axis does not change if both a and b are transformed. A
    matmul of two transformed operands is the matmul of the operands, up to roundings.

    The order of the operations is part of the contract. Each is one fp32 operation, rounded to nearest even:

    1. the elements are widened to fp32, and those with their bit in `signs` are negated (both exact);
    2. in four stages with the distances 1, 2, 4 and 8, each pair `(a, b)` of elements at this distance becomes
       `(a + b, a - b)`;
    3. each sum is multiplied by 0.25, then rounded to x's dtype.

    To undo the transform, apply it with `signs=0` and negate the same elements afterwards. That gives x up to
    roundings. The op has no gradient.

    Args:
        x: `(M, K)` or `(E, N, K)`; bfloat16, float16 or float32; any strides.
        axis: -1 for elements along K, -2 for elements along M (or N). The size of that dimension must be a multiple of
            16.
        signs: 16 bits. If bit j is set, element j of each 16 is negated; bit 0 is the lowest. The default 0xD7E8 is the
            vector of TransformerEngine: + + + - + - - - - - - + - + - -.

    Returns:
        x's shape and dtype, contiguous for both axes.

    Special values: as the arithmetic gives. A NaN makes all 16 elements NaN. A single Inf gives 16 Infs; two or more
        also give NaN. A sum beyond the range of fp32, or a result beyond x's dtype, is Inf; a result may be 4 times as
        large as the largest element. A sum of zeros of both signs is +0. Subnormal numbers keep their values.

    Raises:
        TypeError: x has a dtype that is not listed above, or signs is not an integer.
        ValueError: x has a rank that is not listed above; axis is not -1 or -2; a size is not a multiple of 16; or
            signs has more than 16 bits or is negative.

    Example:
        >>> x = torch.zeros(1, 16)
        >>> x[0, 3] = 4.0  # signs negates element 3
        >>> hadamard_16(x).tolist()[0][:8]
        [-1.0, 1.0, 1.0, -1.0, -1.0, 1.0, 1.0, -1.0]
        >>> hadamard_16(hadamard_16(x), signs=0)[0, 3].item()
        -4.0

    Source: NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), section 4.2; TransformerEngine,
        `get_rht_matrix`. TransformerEngine multiplies by a bfloat16 matrix on the tensor cores, which sum 16 products
        in an order that is not specified, so its results may differ from these in the last bit.
    """
    check_args(x, axis=axis, signs=signs)
    if axis == -2:
        x = x.mT
    negated = (1 << torch.arange(SIZE, device=x.device)) & signs != 0
    v = x.contiguous().to(torch.float32).unflatten(-1, (x.shape[-1] // SIZE, SIZE))  # (..., C/16, 16)
    v = torch.where(negated, -v, v)
    for distance in (1, 2, 4, 8):
        a, b = v.unflatten(-1, (-1, 2, distance)).unbind(-2)  # (..., C/16, 8 / distance, distance)
        v = torch.stack([a + b, a - b], -2).flatten(-3)
    transformed = (v * 0.25).to(x.dtype).flatten(-2)
    return (transformed.mT if axis == -2 else transformed).contiguous()
