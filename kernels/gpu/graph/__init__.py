"""Layers of graphs on a GPU: convolutions of any shape and everything around them."""
