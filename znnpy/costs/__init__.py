"""Predicts how long layers take: the cost model, costs measured on a machine, and their file."""
