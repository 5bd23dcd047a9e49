"""The scripts and the notebook of examples/."""
