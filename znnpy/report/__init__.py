"""Words and tables about runs and plans: reports of runs, plans in plain text, primitives that were rejected."""
