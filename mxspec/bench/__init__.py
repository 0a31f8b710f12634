"""Benchmarks. A run measures ops, the limits of the machine, and the kernels of other libraries (peers).

`python -m mxspec bench` first checks that a call gives the right results. Then it times the call (`timing`) and shows
the figures (`tables`, `plots`). `record` stores a run in a file. `model` computes the expected time from a GPU's data
sheet. `moe` times the kernels of one layer of a mixture of experts.
"""
