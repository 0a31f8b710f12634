"""Code that several references share: argument checks, casts and scale rules, token groups, matmul operands in fp64."""
