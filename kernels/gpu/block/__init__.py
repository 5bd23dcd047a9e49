"""Direct convolution by stride-fixed blocks: maps and kernels are divided according to the GPU's properties."""
