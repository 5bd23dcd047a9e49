"""Layers with tensors in host memory, computed in sub-layers on a GPU."""
