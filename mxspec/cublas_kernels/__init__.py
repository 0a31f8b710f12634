"""cuBLAS, called through PyTorch's scaled matmuls. Each op has one file. FP8 runs on Hopper, MX on Blackwell."""
