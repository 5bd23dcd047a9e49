"""What runs and plans tell in words and tables: reports of runs, plans in plain text, primitives that were rejected."""
