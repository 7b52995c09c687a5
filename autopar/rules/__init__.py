"""Op rules as data: how the dims of an op's operands and results relate."""
