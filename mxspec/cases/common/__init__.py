"""Building blocks that the cases of several ops share."""
