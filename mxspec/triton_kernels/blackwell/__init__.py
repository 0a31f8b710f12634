"""Kernels in Triton's own language for Blackwell (sm_100). They were compiled and interpreted. No GPU has run them."""
