"""FP8 matmuls with fp32 scales, and a quantizer of token groups, for Hopper."""
