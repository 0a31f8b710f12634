"""Code that several kernels share: numerics, layouts, token groups, launches."""
