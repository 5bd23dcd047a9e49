"""Run the command line as `python -m znnpy`. Signals are handled from the first line on, before anything is loaded."""

import os

try:
    from znnpy.stopping import end, leave_when_stopped

    leave_when_stopped()
except KeyboardInterrupt:  # Python's own answer to Ctrl-C, before ours stands
    os.write(2, b"interrupted\n")
    os._exit(130)


def main() -> None:
    """Run the command line on the arguments of this process, and end the process."""
    from znnpy.cli import main as command_line

    try:
        command_line(prog_name="znnpy")
    except SystemExit as done:
        end(done.code)
        raise


if __name__ == "__main__":
    main()
