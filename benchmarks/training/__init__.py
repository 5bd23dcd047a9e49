"""Train the networks that ship with znnpy; each program runs by itself, in PyTorch, and says which data it needs."""
