"""Kernels for Hopper in Gluon.

`fp8/`, `mx/` and `nvfp4/` hold one matmul each, a warp-specialized kernel of persistent programs. `fp8/` and `mx/` also
hold quantizers. These files serve them:

- `scheduler.py` says which block of the output a program computes next.
- `choice.py` chooses a tile of the matmuls of bfloat16 values.
- `rows.py` reads an operand that has fewer rows than a tile.
- `pipeline.py` says which stage of shared memory is free and which is full.
- `warpgroup.py` has the work of a math warpgroup apart from its matmuls.
- `names.py` has the names that differ between Triton releases.
- `swiglu.py` has SwiGLU and its gradient in PTX, also for kernels in plain Triton.
- `releases.py` says under which Triton releases these kernels are offered.
"""
