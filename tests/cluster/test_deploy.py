"""The scripts for Slurm in `deploy/`, run on programs that note how they are called."""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import znnpy
from tests.support.fake_programs import DEPLOY, Fakes, in_bytes, option
from tests.support.infer_process import thin
from tests.support.stored_outputs import stored

REPOSITORY = DEPLOY.parent
SCRIPTS = sorted(path.name for path in DEPLOY.glob("*.sh"))
BATCH = [name for name in SCRIPTS if name != "slurm_submit.sh"]
SLURM = {"SLURM_JOB_ID": "77", "SLURM_CPUS_PER_TASK": "32", "SLURM_MEM_PER_NODE": "131072"}
OPTIONS = ("/data/my volume.zarr", "--out", "/data/out.zarr", "--gpus", "all")


@pytest.fixture
def fakes(tmp_path: Path) -> Fakes:
    return Fakes(tmp_path)


def directives(name: str) -> dict[str, str]:
    """Return the options that a script gives sbatch; those behind the first command do not count."""
    found: dict[str, str] = {}
    for line in (DEPLOY / name).read_text().splitlines():
        if line.startswith("#SBATCH "):
            word, _, value = line.removeprefix("#SBATCH ").partition("=")
            found[word] = value
        elif line and not line.startswith("#"):
            break
    return found


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_bash(name: str) -> None:
    assert (DEPLOY / name).stat().st_mode & stat.S_IXUSR
    done = subprocess.run(["bash", "-n", str(DEPLOY / name)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("program", "names"), [("shellcheck", SCRIPTS), ("hadolint", ["Dockerfile"])])
def test_linters_find_nothing(program: str, names: list[str]) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    paths = [str(DEPLOY / name) for name in names]
    done = subprocess.run([program, *paths], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", BATCH)
def test_jobs_name_what_they_need(name: str) -> None:
    found = directives(name)
    assert {"--cpus-per-task", "--mem", "--time", "--requeue", "--open-mode"} <= set(found)
    one = {"--nodes": "1", "--ntasks": "1"}
    assert found.items() >= ({"--ntasks-per-node": "1"} if name == "slurm_dask.sh" else one).items()
    assert ("%A_%a" in found["--output"]) == (name == "slurm_parts.sh")  # tasks of an array share no log


def test_a_script_stops_where_slurm_tells_no_memory(fakes: Fakes) -> None:
    for name in BATCH:
        done = fakes.run(name, *OPTIONS, **{**SLURM, "SLURM_MEM_PER_NODE": ""})
        assert done.returncode != 0
        assert "with --mem" in done.stderr
    assert fakes.calls == []


def test_the_dask_script_starts_scheduler_workers_and_client(fakes: Fakes) -> None:
    done = fakes.run("slurm_dask.sh", *OPTIONS, **SLURM, SLURM_JOB_NUM_NODES="8", TMPDIR=str(fakes.folder))
    assert (done.returncode, done.stderr) == (0, "")
    scheduler, *others = fakes.calls
    file = str(fakes.folder / "znnpy-77.json")
    assert scheduler[:2] == ["dask", "scheduler"]
    assert option(scheduler, "--scheduler-file") == file
    named = {" ".join(call[:2]): call for call in others}
    srun = named.pop(next(name for name in named if name.startswith("srun")))
    assert [option(srun, f"--{name}") for name in ("nodes", "ntasks", "ntasks-per-node")] == ["8", "8", "1"]
    assert option(srun, "--cpus-per-task") == "32"
    assert option(srun, "--kill-on-bad-exit") == "0"  # a worker that is lost ends no others
    worker = named.pop("dask worker")
    assert srun[-len(worker) :] == worker
    assert [option(worker, f"--{name}") for name in ("nworkers", "nthreads")] == ["1", "32"]
    assert option(worker, "--scheduler-file") == file
    limit = in_bytes(option(worker, "--memory-limit"))
    assert 0.85 * 128 * 2**30 < limit < 0.95 * 128 * 2**30
    assert list(named) == ["znnpy infer"]
    assert named["znnpy infer"] == ["znnpy", "infer", *OPTIONS, "--cluster", file, "--resume"]
    assert not Path(file).exists()


def test_the_dask_script_fails_as_the_client_does_and_leaves_nothing(fakes: Fakes) -> None:
    done = fakes.run("slurm_dask.sh", *OPTIONS, **SLURM, SLURM_JOB_NUM_NODES="1", ZNNPY_CODE="3")
    assert done.returncode == 3
    assert not list(fakes.folder.glob("*.json"))
    left = [call for call in Path("/proc").glob("[0-9]*/environ") if _names(call, str(fakes.folder))]
    assert left == []  # the scheduler and the workers were ended


def _names(environment: Path, folder: str) -> bool:
    try:
        return f"CALLS={folder}".encode() in environment.read_bytes()
    except OSError:
        return False


def test_parts_of_an_array(fakes: Fakes) -> None:
    array = {**SLURM, "SLURM_ARRAY_TASK_COUNT": "64"}
    assert fakes.run("slurm_parts.sh", *OPTIONS, **array, SLURM_ARRAY_TASK_ID="3").returncode == 0
    assert fakes.calls == [
        ["znnpy", "infer", *OPTIONS, "--part", "3/64", "--threads", "32", "--ram", f"{96 * 1024}M"],
    ]


def test_parts_that_are_submitted_again(fakes: Fakes) -> None:
    """Slurm counts the tasks of the second array; `PARTS` says how many there were."""
    array = {**SLURM, "SLURM_ARRAY_TASK_COUNT": "2", "PARTS": "64"}
    assert fakes.run("slurm_parts.sh", *OPTIONS, **array, SLURM_ARRAY_TASK_ID="12").returncode == 0
    assert option(fakes.calls[0], "--part") == "12/64"


def test_exit_codes_of_parts_and_of_the_last_job(fakes: Fakes) -> None:
    array = {"SLURM_ARRAY_TASK_COUNT": "2", "SLURM_ARRAY_TASK_ID": "1"}
    for name in ("slurm_parts.sh", "slurm_finish.sh"):
        assert fakes.run(name, *OPTIONS, **SLURM, **array, ZNNPY_CODE="3").returncode == 3


def test_the_last_job_finishes_with_the_same_numbers(fakes: Fakes) -> None:
    assert directives("slurm_finish.sh").items() >= {
        (name, value) for name, value in directives("slurm_parts.sh").items() if name in ("--mem", "--cpus-per-task")
    }
    assert fakes.run("slurm_finish.sh", *OPTIONS, **SLURM).returncode == 0
    assert fakes.calls == [["znnpy", "infer", *OPTIONS, "--finish", "--threads", "32", "--ram", f"{96 * 1024}M"]]


@pytest.mark.parametrize("parts", ["64", "64%16"])
def test_an_array_and_its_last_job_are_submitted(fakes: Fakes, parts: str) -> None:
    done = fakes.run("slurm_submit.sh", parts, *OPTIONS)
    assert (done.returncode, done.stdout) == (0, "parts: job 101, completed by job 102\n")
    array, finish = fakes.calls
    assert option(array, "--array") == f"1-{parts}"
    assert array[-len(OPTIONS) - 1 :] == [str(DEPLOY / "slurm_parts.sh"), *OPTIONS]
    assert option(finish, "--dependency") == "afterok:101"
    assert finish[-len(OPTIONS) - 1 :] == [str(DEPLOY / "slurm_finish.sh"), *OPTIONS]
    assert "--parsable" in array
    assert "--parsable" in finish


@pytest.mark.parametrize("arguments", [(), ("64",), ("0", *OPTIONS), OPTIONS])
def test_submitting_needs_a_number_of_parts(fakes: Fakes, arguments: tuple[str, ...]) -> None:
    done = fakes.run("slurm_submit.sh", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("usage:")
    assert fakes.calls == []


@pytest.mark.slow
def test_an_array_of_three_gives_what_one_process_gives(tmp_path: Path) -> None:
    thin(tmp_path)
    np.save(tmp_path / "volume.npy", np.random.default_rng(3).random((70, 65, 66), np.float32))
    options = ("volume.npy", "--network", "thin.yaml", "--items", "64,64,64", "--no-calibrate", "--quiet")
    program = tmp_path / "bin" / "znnpy"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m znnpy "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_COUNT": "3"}
    environment |= {"SLURM_CPUS_PER_TASK": "1", "SLURM_MEM_PER_NODE": "2048", "PYTHONPATH": str(REPOSITORY)}
    for name, part in (
        ("slurm_parts.sh", "3"),
        ("slurm_parts.sh", "1"),
        ("slurm_parts.sh", "2"),
        ("slurm_finish.sh", ""),
    ):
        assert not (tmp_path / "out.zarr").exists()
        subprocess.run(
            ["bash", str(DEPLOY / name), *options, "--out", "out.zarr"],
            cwd=tmp_path,
            env={**environment, "SLURM_ARRAY_TASK_ID": part},
            check=True,
        )
    znnpy.infer(tmp_path / "volume.npy", tmp_path / "thin.yaml", out=tmp_path / "alone.h5", calibrate=False)
    found, exact = stored(tmp_path / "out.zarr"), stored(tmp_path / "alone.h5")
    assert found.shape == exact.shape == (69, 64, 65)
    assert np.abs(found - exact).max() <= 1e-6
    assert not list(tmp_path.glob("out.zarr.*"))
