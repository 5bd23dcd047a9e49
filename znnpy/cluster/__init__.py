"""Runs on many machines: which worker computes which part of a volume."""
