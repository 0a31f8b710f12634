"""cuBLAS through PyTorch's own scaled matmuls, one file an op, on Hopper."""
