"""What several kernels share: numerics, layouts, token groups, launches."""
