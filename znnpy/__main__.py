"""`python -m znnpy` is `znnpy`."""

from znnpy.cli import main

main()
