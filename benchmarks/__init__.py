"""Benchmarks of znnpy, run by `python -m benchmarks PROGRAM`. README.md lists the questions that they answer."""
