"""MX matmuls by bfloat16 tensor cores, for Hopper."""
