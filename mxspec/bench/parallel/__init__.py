"""`python -m mxspec bench --parallel`: times expert parallelism and FSDP2's gather on several ranks, under torchrun.

A rank is one process. On GPUs it has one GPU, and NCCL connects the ranks. Without GPUs, gloo connects them, and the
times say nothing about GPUs.

`command` starts the run and shows it. `layer` has the arms of the layer's step, their check and their parts. `traffic`
has the four exchanges alone, and FSDP2's gather. `turns` times calls that all ranks make together. `report` has the
figures and their tables.
"""
