"""The shapes that are worth timing, by kind of op. An op's `bench_cases` uses the kinds that it knows."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path


@dataclass(frozen=True)
class Shapes:
    """Sizes by kind: tokens M, features N and K, experts E, token groups G."""

    matrices: tuple[tuple[int, int], ...] = ()  # (M, K): activations to quantize
    experts: tuple[tuple[int, int, int], ...] = ()  # (E, N, K): weights to quantize, one matrix per expert
    padding: tuple[tuple[int, int, int], ...] = ()  # (M, K, G): token groups to pad
    linear: tuple[tuple[int, int, int], ...] = ()  # (M, N, K): `(M, K) @ (N, K)^T`
    grouped: tuple[tuple[int, int, int, int], ...] = ()  # (M, N, K, E): the tokens of E experts times their weights
    wgrad: tuple[tuple[int, int, int], ...] = ()  # (M, N, K): as linear, but K counts the tokens

    def __or__(self, other: Shapes) -> Shapes:
        """The shapes of both, without duplicates."""
        kinds = [f.name for f in fields(self)]
        return Shapes(*(tuple(dict.fromkeys(getattr(self, k) + getattr(other, k))) for k in kinds))

    @classmethod
    def read(cls, path: Path) -> Shapes:
        """Read shapes from a JSON file: an object with some of the kinds above, each a list of lists of sizes."""
        try:
            given = json.loads(path.read_text())
        except FileNotFoundError as error:
            raise ValueError(f"shapes: {path} is neither a file nor one of the sets {', '.join(SETS)}") from error
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"shapes: {path}: {error}") from error
        sizes = {kind: len(names.split()) for kind, names in KINDS.items()}
        if not isinstance(given, dict) or not any(given.values()) or given.keys() - sizes:
            found = sorted(given) if isinstance(given, dict) else type(given).__name__
            raise ValueError(f"shapes: {path} holds {found}; needs an object with shapes of some of {', '.join(sizes)}")
        for kind, shapes in given.items():
            if not (isinstance(shapes, list) and all(_is_shape(shape, sizes[kind]) for shape in shapes)):
                raise ValueError(
                    f"shapes: {path}: {kind} = {shapes}; needs a list of [{KINDS[kind]}], integers from 1 to 2^40"
                )
        return cls(**{kind: tuple(map(tuple, shapes)) for kind, shapes in given.items()})


KINDS = {
    "matrices": "M K",
    "experts": "E N K",
    "padding": "M K G",
    "linear": "M N K",
    "grouped": "M N K E",
    "wgrad": "M N K",
}


def _is_shape(shape: object, sizes: int) -> bool:
    return isinstance(shape, list) and len(shape) == sizes and all(type(n) is int and 0 < n < 2**40 for n in shape)


# The shapes that torchao times, so that figures are comparable with its pull requests. Its files are in
# benchmarks/prototype/moe_training:
_TORCHAO = Shapes(
    # mxfp8/bench_cutedsl_quantize_2d_1x32.py; and a matrix of 2^31 bytes in bf16
    matrices=(*product((8192, 32768, 131072), (2048, 7168)), (32768, 32768)),
    # mxfp8/bench_quantize_3d.py
    experts=tuple((E, N, K) for E, (N, K) in product((1, 8, 32), ((8192, 5120), (7168, 2048)))),
    # mxfp8/bench_pad_token_groups.py
    padding=tuple(product((16384,), (1536, 2048, 5120, 7168), (1, 4, 8, 16))),
    # ../blockwise_fp8_training/bench_1x128_128x128_gemms.py and bench_linear_roofline.py; ../../float8/utils.py, pow2
    linear=((16640, 5120, 8192), (4096, 18432, 7168), (8192, 8192, 8192)),
    # benchmark_scaled_grouped_mm_dq.py: Llama 4 and DeepSeek-V3, by the number of experts on one GPU
    grouped=(
        *((32768, 8192, 5120, E) for E in (1, 8)),
        *((32768, 2048, 7168, E) for E in (4, 8)),
        (128000, 2048, 7168, 8),
    ),
)
# Shapes whose time is the launch and not the memory: decoding, a single prompt, sizes that fit no tile.
_SMALL = Shapes(
    matrices=(*product((1, 16, 128), (7168,)), (4096, 2048), (384, 1408), (1152, 3456)),
    experts=((5, 160, 1408), (8, 1408, 2048)),
    padding=((1024, 2048, 8), (128, 7168, 64)),
    linear=tuple(product((16, 64, 128), (7168,), (2048, 7168))),
    grouped=((4096, 2048, 7168, 8),),
)
# The numbers of experts in today's models.
_GROUPS = Shapes(
    experts=((64, 8192, 5120), (64, 7168, 2048)),
    padding=(*product((16384,), (2048, 5120, 7168), (64, 256)), *((131072, 7168, G) for G in (1, 8, 64, 256))),
    grouped=((32768, 2048, 7168, 64),),
)
# The layers of DeepSeek-V3, and a weight gradient.
_DEEPSEEK = Shapes(
    linear=((4096, 4096, 7168), (4096, 7168, 2048), (32768, 2048, 7168)),
    wgrad=((7168, 4096, 4096),),
    grouped=((32768, 7168, 2048, 8),),  # the dgrad of (32768, 2048, 7168), and the forward pass of `down`
)
SETS = {"torchao": _TORCHAO, "small": _SMALL, "groups": _GROUPS, "deepseek": _DEEPSEEK}
