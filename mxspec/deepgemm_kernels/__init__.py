"""DeepGEMM, where its package is installed, one file an op, on Hopper."""
