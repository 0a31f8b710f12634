"""Matmuls for Hopper in Gluon: warp-specialized, persistent programs. `fp8/` and `mx/` hold one kernel each.

`scheduler.py` says which tile comes next, `pipeline.py` which stage of shared memory is free or full, `warpgroup.py`
what a math warpgroup does beside its matmuls. `releases.py` says under which Triton releases these kernels are offered.
"""
