"""cuConv: rows of all filters with all rows of the input they meet, then the sums of what belongs together."""
