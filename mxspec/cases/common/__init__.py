"""What the cases of several ops are made of."""
