"""The definition of every op in plain PyTorch, one file per op. Read these files first."""
