"""Measures how fast layers run on a machine, and keeps what was measured."""
