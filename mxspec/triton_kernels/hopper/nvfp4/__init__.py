"""NVFP4 matmuls on Hopper, from bfloat16 values."""
