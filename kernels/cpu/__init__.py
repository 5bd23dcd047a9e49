"""Primitives for the CPU."""
