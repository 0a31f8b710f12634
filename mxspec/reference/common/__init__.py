"""What several references share: refusals, casts and scale rules, token groups, operands in fp64."""
