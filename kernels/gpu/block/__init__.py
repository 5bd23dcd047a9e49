"""Direct convolution by stride-fixed blocks: division of maps and kernels by what the card is."""
