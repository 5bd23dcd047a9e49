"""The fused tiled FFT convolution: transforms of overlapping tiles, products on tensor cores, transforms back."""
