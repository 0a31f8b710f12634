"""Machine code without a GPU: every kernel of an op, compiled for Hopper and Blackwell, and looked at.

`fake_gpu`: launches compile instead of running. `measure`: what came out. `covering` and `planner`: which cases are
enough. `compile`: one op, checked. `cli`: `python -m mxspec compile`.
"""
