"""Execution: runs a planned step. Knows tensors and the model; owns no policy."""
