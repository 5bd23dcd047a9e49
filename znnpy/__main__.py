"""`python -m znnpy` is `znnpy`. Loads nothing before it can be interrupted without a traceback."""

import sys


def main() -> None:
    """Run the command line on this process's words, and exit."""
    try:
        from znnpy.cli import main as command_line

        command_line(prog_name="znnpy")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
