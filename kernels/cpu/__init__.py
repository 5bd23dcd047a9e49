"""Primitives on the CPU."""
