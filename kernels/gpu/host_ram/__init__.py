"""Layers whose tensors live in the memory of the host, computed in sub-layers on a GPU."""
