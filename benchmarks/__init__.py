"""Benchmarks of znnpy: `python -m benchmarks PROGRAM`. README.md lists the questions that each program answers."""
