"""Machine code without a GPU: every kernel of an op, compiled for Hopper and Blackwell, and checked.

- `fake_gpu`: launches compile instead of running.
- `measure`: the registers, memory and instructions of a compiled kernel.
- `covering` and `planner`: which cases are enough.
- `compile`: compile and check one op.
- `cli`: `python -m mxspec compile`.
"""
