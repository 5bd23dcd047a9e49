"""Fused tiled FFT convolution: transforms of overlapping tiles, products on tensor cores, inverse transforms."""
