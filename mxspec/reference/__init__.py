"""The meaning of every op, one file an op, in plain PyTorch. Read these first."""
