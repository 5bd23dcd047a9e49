"""Ctrl-C and SIGTERM at any moment of the start of a process: 130 or 143, one sentence, no traceback, no crash.

A signal that arrives before the first line of znnpy ran is Python's to answer, and not tested. From then on, which
/proc shows as a handler for SIGTERM, each is.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.cli import Place
from tests.support.messages import assert_holds
from znnpy import progress, stopping
from znnpy.run.pipeline import Event
from znnpy.stopping import Terminated, check_stopped, working

pytestmark = pytest.mark.slow

PROGRAM = Path(sys.executable).with_name("znnpy")
ANSWERS = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "stopped by SIGTERM")}
FEW, MANY = 16, 150
LATEST = 1.5  # seconds from the first handler on; a small run takes about one

needs_proc = pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads /proc/PID/status")


def start(arguments: list[str], folder: Path) -> subprocess.Popen[str]:
    """Start a run and wait until its handlers are installed."""
    process = subprocess.Popen(
        [PROGRAM, *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=_heed
    )
    deadline = time.monotonic() + 60
    while not handles(process.pid, signal.SIGTERM):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return process


def _heed() -> None:
    """Restore SIGINT: a shell starts background jobs, and so perhaps pytest, with it ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def handles(process: int, number: int) -> bool:
    status = Path(f"/proc/{process}/status").read_text()
    match = re.search(r"^SigCgt:\s*(\w+)$", status, re.MULTILINE)
    assert match is not None
    return bool(int(match[1], 16) >> (number - 1) & 1)


def stop(place: Place, arguments: list[str], seconds: float, number: signal.Signals) -> bool:
    """Send a signal so long after the first handler stands, and judge the answer; False where the run was done."""
    process = start(arguments, place.folder)
    time.sleep(seconds)
    done = process.poll() is not None
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    context = (number.name, seconds, process.returncode, stdout, stderr)
    assert "Traceback" not in stderr, context
    assert "Exception ignored" not in stderr, context
    assert "Aborted" not in stderr, context
    if process.returncode == 0 or (process.returncode == -number and stdout):  # the report is out: all is done
        assert "voxels/s" in stdout, context
        assert place.out.exists(), context
        return not done
    code, sentence = ANSWERS[number]
    assert process.returncode == code, context
    assert stderr.splitlines()[-1].startswith(sentence), context
    assert not place.out.with_name("out.h5.lock").exists(), context
    return True


@needs_proc
@pytest.mark.parametrize("tries", [pytest.param(FEW, id="few"), pytest.param(MANY, id="many", marks=pytest.mark.long)])
def test_signal_during_the_start_ends_the_run(place: Place, tries: int) -> None:
    place.write_volume(np.random.default_rng(1).integers(0, 256, (64, 64, 64), np.uint8))
    arguments = [*place.arguments, "--overwrite", "--patch", "4,4,4", "--threads", "1"]
    rng = np.random.default_rng(tries)
    moments = np.sort(rng.uniform(0, LATEST, tries))
    signals = [list(ANSWERS)[index] for index in rng.integers(0, 2, tries)]
    heard = [stop(place, arguments, float(moment), number) for moment, number in zip(moments, signals, strict=True)]
    assert sum(heard) > tries / 2


@needs_proc
@pytest.mark.parametrize("number", ANSWERS, ids=lambda number: number.name)
@pytest.mark.parametrize("arguments", [["--help"], ["primitives"], ["plan", "--shape", "40,40,40"]], ids=lambda w: w[0])
def test_every_command_answers_a_signal_at_once(place: Place, arguments: list[str], number: signal.Signals) -> None:
    process = start(arguments, place.folder)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout, stderr) == (ANSWERS[number][0], "", f"{ANSWERS[number][1]}\n")


def test_handlers_are_installed_before_libraries_load() -> None:
    code = (
        "import signal, sys; import znnpy.__main__\n"
        "print(signal.getsignal(signal.SIGTERM) != signal.SIG_DFL, *({'click', 'rich', 'numpy'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


SWALLOWS = """
import os, signal, sys
from znnpy.stopping import check_stopped, leave_when_stopped, working
leave_when_stopped()
with working():
    try:
        os.kill(os.getpid(), signal.{name})
    except KeyboardInterrupt:
        print("swallowed", flush=True)
    {then}
print("went on")
"""


@pytest.mark.parametrize("number", ANSWERS, ids=lambda number: number.name)
def test_second_signal_ends_a_process_that_swallowed_the_first(number: signal.Signals) -> None:
    code = SWALLOWS.format(name=number.name, then=f"os.kill(os.getpid(), signal.{number.name})")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, preexec_fn=_heed)
    assert (done.returncode, done.stdout, done.stderr) == (ANSWERS[number][0], "swallowed\n", f"{ANSWERS[number][1]}\n")


def test_run_with_a_swallowed_signal_stops_at_its_next_step() -> None:
    with working(), progress.show() as callback:
        with pytest.raises(Terminated):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Terminated):
            callback(progress_event())
    check_stopped_anew()


def progress_event() -> Event:
    return Event(1, 2, 10, 20, 1.0, {}, 40, 1, 2, 0.5)


def check_stopped_anew() -> None:
    """Work that begins later is not stopped by what stopped earlier work."""
    with working():
        check_stopped()


def test_signals_ignored_by_the_parent_stay_ignored(place: Place) -> None:
    def ignore() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    code = f"import os, signal; {LEAVES}; os.kill(os.getpid(), signal.SIGINT); print('went on')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, preexec_fn=ignore)
    assert (done.returncode, done.stdout, done.stderr) == (0, "went on\n", "")


LEAVES = "from znnpy.stopping import end, leave_when_stopped, working; leave_when_stopped()"
NATIVE = """
import os, sys, threading
{leaves}
threading.Thread(target=threading.Event().wait).start()  # would keep the interpreter from ending
sys.stdout.write("said")
end({code})
os._exit(7)
"""


@pytest.mark.parametrize(("code", "left"), [(130, 130), (1, 1), (0, 7), (None, 7)])
def test_stopped_process_waits_for_no_thread_and_loses_no_line(code: int | None, left: int) -> None:
    script = NATIVE.format(leaves=LEAVES, code=code)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (left, "said", "")


def test_handlers_are_restored_afterwards(place: Place) -> None:
    before = [signal.getsignal(number) for number in stopping.SENTENCES]
    assert place.run("primitives").exit_code == 0
    assert place.infer().exit_code == 0
    assert [signal.getsignal(number) for number in stopping.SENTENCES] == before


def test_stopped_run_without_progress_advises_no_resume(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

    monkeypatch.setattr("znnpy.run.cpu_backend.touch", interrupt)
    result = place.infer()
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


def test_stopped_run_reports_finished_columns(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = list[int]()

    def stop_in_the_middle(self: object, event: Event) -> str:
        if event.columns_done and not sent:
            sent.append(event.columns_done)
            os.kill(os.getpid(), signal.SIGTERM)
        return ""

    monkeypatch.setattr(progress._Speed, "describe", stop_in_the_middle)
    result = place.infer("--patch", "4,4,4", "--cover", "patches", "--threads", 1)
    assert result.exit_code == 143
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("stopped by SIGTERM"))
    assert_holds(line, " of 80 columns", "--resume")


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)])
def test_stop_that_a_library_wraps_is_raised_again(number: signal.Signals, kind: type[KeyboardInterrupt]) -> None:
    """The compiled part of pydantic does so where a signal arrives while it builds a model."""

    def wrap() -> None:
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt as error:
            raise RuntimeError("a library's own error") from error

    with pytest.raises(kind) as caught, working():
        wrap()
    assert type(caught.value) is kind
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_error_without_a_stop_is_left_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="own"), working():
        raise RuntimeError("its own")
