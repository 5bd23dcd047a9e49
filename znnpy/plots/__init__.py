"""Plots of plans and runs. PNG figures need matplotlib, which the extra `plots` installs."""
