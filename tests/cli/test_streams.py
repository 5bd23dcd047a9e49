"""Standard streams that are closed, full or gone: the run goes on, and what cannot be told is told by the exit code."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli import Place

pytestmark = pytest.mark.slow

PROGRAM = Path(sys.executable).with_name("znnpy")


def shell(arguments: list[str], redirection: str) -> subprocess.CompletedProcess[str]:
    command = shlex.join([str(PROGRAM), *arguments])
    return subprocess.run(["sh", "-c", f"{command} {redirection}"], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("redirection", ["2>&-", ">&-", "<&- >&- 2>&-", "2>/dev/full"])
def test_run_succeeds_without_standard_streams(place: Place, redirection: str) -> None:
    done = shell(place.arguments, redirection)
    assert done.returncode == 0
    assert ("voxels/s" in done.stdout) == (">&-" not in redirection.replace("2>&-", ""))
    checked = place.run("verify", place.out, place.volume, "--network", place.folder / "net.yaml", "--samples", 100)
    assert checked.exit_code == 0


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_unreadable_error_is_an_exit_code(place: Place, redirection: str) -> None:
    assert shell(["infer", str(place.folder / "gone.h5")], redirection).returncode == 1


@pytest.mark.parametrize("json", [(), ("--json",)])
def test_full_stdout_is_reported_in_one_sentence(place: Place, json: tuple[str, ...]) -> None:
    done = shell([*place.arguments, *json], ">/dev/full")
    assert done.returncode == 1
    assert done.stderr.splitlines()[1:] == [
        "Error: cannot print on stdout: No space left on device; files that the command writes are complete"
    ]
    assert place.out.exists()


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["infer", "--help"], ["primitives"]])
def test_help_to_full_stdout_fails_with_one_sentence(arguments: list[str]) -> None:
    done = shell(arguments, ">/dev/full")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: cannot print on stdout: No space left on device")
    assert done.stderr.count("\n") == 1


def test_plan_file_is_written_even_if_printing_fails(place: Place) -> None:
    plan = place.folder / "plan.json"
    done = shell(["plan", "--shape", "40,40,40", "--out", str(plan)], ">/dev/full")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert plan.exists()


def test_closed_stderr_is_not_replaced_by_the_output(place: Place) -> None:
    """Descriptor 2 is not the output's: whatever a library writes to standard error stays out of it."""
    code = (
        "import os, sys; from znnpy.cli import main; main(['primitives'], standalone_mode=False)\n"
        "sys.exit(os.open('volume.h5', os.O_RDONLY) == 2)"
    )
    done = subprocess.run(
        ["sh", "-c", f"{shlex.join([sys.executable, '-c', code])} 2>&-"],
        cwd=place.folder,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0


INTERRUPTED_IMPORT = """
import os, runpy, signal, sys

class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.argv = ['znnpy', *{arguments!r}]
runpy.run_module('znnpy', run_name='__main__')
"""


@pytest.mark.parametrize("name", ["znnpy.stopping", "znnpy.cli", "click", "pydantic", "numpy", "h5py"])
def test_ctrl_c_while_libraries_load_ends_the_process(place: Place, name: str) -> None:
    code = INTERRUPTED_IMPORT.format(name=name, arguments=place.arguments)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 128 + signal.SIGINT
    assert "Traceback" not in done.stderr
    assert not place.out.exists()


def test_ctrl_c_while_options_are_parsed_ends_the_process(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("znnpy.command_options.parse_bytes", interrupt)
    result = place.infer("--ram", "2G")
    assert result.exit_code == 128 + signal.SIGINT
    assert "Traceback" not in result.output
