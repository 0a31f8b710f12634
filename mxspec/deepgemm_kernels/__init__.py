"""DeepGEMM, if its package is installed, on Hopper. Each op has one file."""
