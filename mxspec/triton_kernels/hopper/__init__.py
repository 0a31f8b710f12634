"""Matmuls for Hopper in Gluon: warp-specialized, persistent programs. `fp8/` and `mx/` hold one kernel each.

- `scheduler.py` says which block of the output a program computes next.
- `pipeline.py` says which stage of shared memory is free and which is full.
- `warpgroup.py` has the work of a math warpgroup apart from its matmuls.
- `names.py` has the names that differ between Triton releases.
- `releases.py` says under which Triton releases these kernels are offered.
"""
