"""Read and check files of networks and weights. Only this package flips kernels."""
