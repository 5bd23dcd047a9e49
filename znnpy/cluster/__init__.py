"""Many processes write one output: each computes work items, which are parts of it that nobody else writes."""
