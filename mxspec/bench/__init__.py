"""Benchmarks: every figure beside the machine's own limit and the peers', read in one run.

`python -m mxspec bench` proves each call right, times it (`timing`), and tells what came out (`tables`, `plots`);
a `record` is a run as it is stored. `model` says what to expect from the data sheet, `moe` walks through one layer.
"""
