"""Tiles that the kernels of several ops share."""
