"""Convolutions of graphs as products on the tensor cores of a GPU."""
