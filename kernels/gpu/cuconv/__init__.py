"""cuConv: products of rows of all filters with rows of the input, then sums of these partial results."""
