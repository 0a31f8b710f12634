"""Matmuls of few bfloat16 tokens by weights in codes, which become bf16 in registers, on Hopper."""
