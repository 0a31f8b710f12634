"""Kernels for Hopper in Gluon.

`fp8/` and `mx/` hold one matmul each, a warp-specialized kernel of persistent programs. `fp8/` also holds a quantizer
of token groups, `both_ways.py`. These files serve them:

- `scheduler.py` says which block of the output a program computes next.
- `pipeline.py` says which stage of shared memory is free and which is full.
- `warpgroup.py` has the work of a math warpgroup apart from its matmuls.
- `names.py` has the names that differ between Triton releases.
- `swiglu.py` has SwiGLU and its gradient in PTX, also for kernels in plain Triton.
- `releases.py` says under which Triton releases these kernels are offered.
"""
