"""FP8 matmuls with fp32 scales, for Hopper."""
