"""Words and exit codes: usage errors are 2, results go to stdout, progress to stderr, `--json` is one document."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import h5py
import numpy as np
import pytest

from tests.support.cli import Place
from znnpy import cli, command_runtime, resumed_kernels
from znnpy.errors import NoPlanError
from znnpy.machine import processor
from znnpy.planner import memory
from znnpy.planner.run_plan import RunPlan
from znnpy.stopping import Terminated
from znnpy.volume.journal import Journal, JournalHeader, journal_path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("infer", "v.h5", "--ram", "12Q"), "'12Q' is not a size: give a number with K, M, G or T, such as 600M or 2G"),
        (
            ("infer", "v.h5", "--ram", "2"),
            "'2' has no unit and means bytes, too few for a run: write 2M or 2G",
        ),
        (("infer", "v.h5", "--ram", "0.0001K"), "'0.0001K' is 0 bytes: give a positive size such as 2G"),
        (("infer", "v.h5", "--threads", "0"), "0 is not in the range 1<=x<=4096"),
        (("infer", "v.h5", "--patch", "64,64"), "'64,64' is not three positive counts of voxels Z,Y,X"),
        (("plan", "--shape", "64,0,64"), "'64,0,64' is not three positive counts of voxels Z,Y,X"),
        (("plan", "--shape", "64,-1,64"), "'64,-1,64' is not three positive counts"),
        (("infer", "v.h5", "--roi", "0-9,0:9,0:9"), "'0-9,0:9,0:9' is not of the form z0:z1,y0:y1,x0:x1"),
        (("infer", "v.h5", "--border", "mirror"), "'mirror' is not one of 'valid', 'reflect'"),
        (("infer", "v.h5", "--output-dtype", "int8"), "'int8' is not one of"),
        (("infer", "v.h5", "--overwrite", "--resume"), "--overwrite starts again and --resume continues"),
        (("infer", "v.h5", "--plan", "p.json", "--ram", "2G"), "--ram is fixed by the plan"),
        (("infer", "v.h5", "--plan", "p.json", "--cover", "columns"), "--cover is fixed by the plan: omit it"),
        (("infer", "v.h5", "--plan", "p.json", "--no-depth-first"), "--no-depth-first is fixed by the plan"),
        (("plan", "--cover", "rows"), "'rows' is not one of 'columns', 'patches'"),
        (("infer", "v.h5", "--depth-first"), "No such option"),
        (("infer", "v.h5", "--only", "cpu.conv.dirct"), "no primitive 'cpu.conv.dirct'; did you mean cpu.conv.direct"),
        (("plan", "--volume", "v.h5", "--shape", "9,9,9"), "--volume and --shape both give a size"),
        (("plan", "--roi", ":,:,:"), "--roi is a part of a volume: give --volume too"),
        (("plan", "--mask", "m.h5"), "--mask lies on a volume: give --volume too"),
        (("plan", "--dataset", "raw"), "--dataset is a part of a volume: give --volume too"),
        (
            ("plan", "--overwrite"),
            "--overwrite replaces the files given as --out, --plot and --report: give one of them",
        ),
        (("plan", "--ram", "9" * 400), "is beyond any memory: give a size such as 600M or 2G"),
        (("plan", "--shape", "9" * 5000 + ",9,9"), "...999999,9,9' is too large: axes of up to 10,000,000 voxels"),
        (("plan", "--patch", "10000001,4,4"), "'10000001,4,4' is too large"),
        (("plan", "--shape", "²,4,4"), "'²,4,4' is not three positive counts"),
        (("plan", "--threads", "9" * 400), "is not in the range 1<=x<=4096"),
        (("infer", "v.h5", "--roi", f"0:{'9' * 5000},:,:"), "...999999,:,:' is not of the form"),
        (("infer", "v.h5", "--out", "."), "'.' is a folder: give the name of a file"),
        (("infer", "v.h5", "--out", "..", "--resume"), "'..' is a folder: give the name of a file"),
        (("plan", "--out", "/", "--overwrite"), "'/' is a folder: give the name of a file"),
        (("infer", "."), "cannot derive an output name from '.': give --out"),
        (("infer",), "Missing argument 'VOLUME'"),
        (("infer", "v.h5", "--gpu"), "No such option"),
        (("verify", "o.h5", "v.h5", "--tolerance", "0"), "0.0 is not a positive number such as 1e-5"),
        (("verify", "o.h5", "v.h5", "--tolerance", "nan"), "nan is not a positive number"),
        (("verify", "o.h5", "v.h5", "--tolerance", "inf"), "inf is not a positive number"),
        (("demo", "--size", "26"), "26 is not in the range 27<=x<=32768"),
        (("inferr", "v.h5"), "No such command 'inferr'"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, tuple) else "",
)
def test_wrong_arguments_are_usage_errors(place: Place, arguments: tuple[str, ...], said: str) -> None:
    before = place.state()
    result = place.run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert said in result.stderr
    assert place.state() == before


def test_numbers_with_leading_zeros_are_decimal(place: Place) -> None:
    assert place.run("plan", "--shape", f"{'0' * 5000}40, 040,40", "--json").exit_code == 0


COMMANDS = ["plan", "infer", "measure", "info", "verify", "demo", "primitives", "graph", "timeline"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_prints_its_help(place: Place, command: str) -> None:
    result = place.run(command, "--help")
    assert result.exit_code == 0
    assert f"{command} [OPTIONS]" in result.stdout


@pytest.mark.parametrize("command", ["infer", "plan"])
def test_long_help_pages_show_every_option_once_in_a_section(place: Place, command: str) -> None:
    page = place.run(command, "--help").stdout.partition("\nInput:\n")[2]
    shown = re.findall(r"^  (?:-h, )?(--[\w-]+)", page, re.MULTILINE)
    options = [of for of in cli.main.commands[command].params if isinstance(of, click.Option)]
    assert sorted(shown) == sorted([*(of.opts[0] for of in options), "--help"])


def test_sections_of_help_pages_name_options_that_exist() -> None:
    known = {of.name for command in ("infer", "plan") for of in cli.main.commands[command].params}
    assert {name for names in command_runtime.SECTIONS.values() for name in names} <= known


def test_infer_writes_beside_the_volume_by_default(place: Place) -> None:
    result = place.run("infer", place.volume, "--network", place.folder / "net.yaml")
    assert result.exit_code == 0
    out = place.folder / "volume_tiny.h5"
    assert out.exists()
    assert result.stdout.startswith(f"{out}: 15x16x19, 4,560 voxels\nspeed ")
    for word in ("voxels/s (plan:", "at the peak (plan:", "computing", "precision  fp32, 32-bit floating point; BLAS"):
        assert word in result.stdout
    assert re.match(r"100%  (\d)/\1 patches, ", result.stderr)  # as many as the plan has
    assert " voxels/s, 35.6 KiB written (" in result.stderr  # 2 maps of 4,560 float32


def test_infer_prints_one_json_document(place: Place) -> None:
    result = place.infer("--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["output"] == str(place.out)
    assert report["shape"] == [15, 16, 19]
    assert report["voxels"] == report["computed"] == 15 * 16 * 19
    assert report["voxels_per_second"] == pytest.approx(report["voxels"] / report["seconds"])
    assert report["peak_bytes"] > 0
    assert report["precision"] == "fp32"


def test_every_option_of_infer_reaches_the_output(place: Place) -> None:
    assert place.infer().exit_code == 0
    whole = place.prediction()
    result = place.infer(
        *("--overwrite", "--roi", "2:18,1:,:24", "--output-dtype", "float16", "--dataset", "raw"),
        *("--weights", place.folder / "net.npz", "--threads", 1, "--ram", "1.5G", "--patch", "4,6,5"),
        *("--only", "cpu.conv.direct", "--json"),
    )
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert (report["threads"], report["ram_bytes"], report["patch"]) == (1, 3 * 2**29, [4, 6, 5])
    assert "cpu.conv.fft_tiled" not in report["primitives"]
    part = place.prediction()
    assert part.dtype == np.float16
    assert part.shape == (2, 11, 15, 18)
    np.testing.assert_allclose(part, whole[:, 2:13, 1:16, :18], atol=5e-4)


@pytest.mark.slow
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_columns_and_patches_give_equal_predictions(place: Place, axis: int) -> None:
    """Along the longest axis, whichever it is."""
    long = np.random.default_rng(8).integers(0, 256, (70, 20, 19), np.uint8)
    place.write_volume(np.ascontiguousarray(np.moveaxis(long, 0, axis)))
    cover = ("--patch", "4,4,4", "--no-depth-first", "--overwrite", "--json", "--cover")
    patches = place.infer(*cover, "patches")
    assert patches.exit_code == 0
    assert json.loads(patches.stdout)["column"] == 0
    expected = place.prediction()
    columns = place.infer(*cover, "columns")
    assert columns.exit_code == 0
    report = json.loads(columns.stdout)
    assert report["column"] >= 4
    assert report["patch"] == [4, 4, 4]
    assert report["columns"] < json.loads(patches.stdout)["columns"]
    np.testing.assert_allclose(place.prediction(), expected, atol=1e-5)
    assert columns.stderr.startswith(f"100%  {report['columns']}/{report['columns']} columns, ")
    assert place.run("verify", place.out, place.volume, "--network", place.folder / "net.yaml").exit_code == 0


def test_no_depth_first_computes_all_fragments_together(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "process_bytes", lambda: 300 * 2**20)  # whatever tests before this one left
    arguments = (
        "plan",
        "fib25_boundary",
        "--shape",
        "330,330,330",
        "--patch",
        "176,176,176",
        "--ram",
        "1100M",
        "--json",
    )
    split = json.loads(place.run(*arguments).stdout)["plan"]
    assert max(RunPlan.from_json(json.dumps(split)).main.sub_batches) > 1
    sentence = place.refusal(*arguments, "--no-depth-first", "--cover", "patches")
    assert "nothing fits in 1,100.0 MiB of RAM: " in sentence
    assert sentence.endswith(", or drop --patch, or drop --cover, or drop --no-depth-first")


@pytest.mark.slow
def test_reflected_output_is_as_large_as_the_volume(place: Place) -> None:
    assert place.infer().exit_code == 0
    valid = place.prediction()
    assert place.infer("--border", "reflect", "--overwrite", "--output-dtype", "uint8").exit_code == 0
    whole = place.prediction()
    assert whole.shape == (2, 20, 23, 25)
    assert whole.dtype == np.uint8
    inside = whole[:, 2 : 2 + 15, 3 : 3 + 16, 3 : 3 + 19]
    np.testing.assert_allclose(inside / 255, valid, atol=0.5 / 255 + 1e-5)


def test_written_plan_is_accepted_by_infer(place: Place) -> None:
    plan = place.folder / "plan.json"
    result = place.run("plan", place.folder / "net.yaml", "--volume", place.volume, "--out", plan, "--threads", 1)
    assert result.exit_code == 0
    assert "predicted" in result.stdout
    assert place.infer("--plan", plan).exit_code == 0
    with h5py.File(place.out) as file:
        assert RunPlan.from_json(file["prediction"].attrs["plan"]) == RunPlan.load(plan)


@pytest.mark.parametrize("size", [(12, 40, 21), (60, 14, 23)])
def test_plan_of_columns_runs_on_another_volume(place: Place, size: tuple[int, int, int]) -> None:
    plan = place.folder / "plan.json"
    arguments = ("plan", place.folder / "net.yaml", "--volume", place.volume, "--cover", "columns", "--patch", "4,6,4")
    assert place.run(*arguments, "--out", plan).exit_code == 0
    made = RunPlan.load(plan)
    assert made.main.streams
    place.write_volume(np.random.default_rng(9).integers(0, 256, size, np.uint8))
    result = place.infer("--plan", plan, "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert (report["axis"], report["column"], report["patch"]) == (made.main.axis, made.main.column_planes, [4, 6, 4])
    assert report["columns"] == len(made.main.for_output(report["shape"], place.network).cover(place.network))
    found = place.prediction()
    assert place.infer("--cover", "patches", "--overwrite").exit_code == 0
    np.testing.assert_allclose(found, place.prediction(), atol=1e-5)


@pytest.mark.slow
def test_plan_prints_one_json_document(place: Place) -> None:
    result = place.run("plan", "n337", "--shape", "150,160,170", "--ram", "8G", "--threads", "2", "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    plan = RunPlan.from_json(json.dumps(document["plan"]))
    assert document["peak_bytes"] == plan.memory.peak <= 8 * 2**30
    assert document["voxels_per_second"] == plan.voxels_per_second
    assert plan.limits.threads == 2


def test_primitives_command_lists_the_table(place: Place) -> None:
    result = place.run("primitives")
    assert result.exit_code == 0
    for name in (
        "cpu.conv.direct",
        "cpu.conv.fft_data",
        "cpu.conv.fft_tiled",
        "cpu.pool.fragments",
        "cpu.maxout.direct",
    ):
        assert name in result.stdout
    rows = json.loads(place.run("primitives", "--json").stdout)
    assert {"name", "kind", "version", "summary", "source", "why_not"} == rows[0].keys()


def test_out_of_memory_is_one_sentence(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    import znnpy.inference

    def refuse(*args: object, **arguments: object) -> None:
        raise MemoryError("Unable to allocate 3.00 GiB")

    monkeypatch.setattr(znnpy.inference, "infer_as_asked", refuse)
    sentence = place.refusal(*place.arguments)
    assert sentence == "out of memory: Unable to allocate 3.00 GiB; give a smaller --ram or --patch"


def test_no_plan_error_keeps_its_own_sentence() -> None:
    """NoPlanError is a MemoryError too; its own sentence is the better one."""
    command = cli.main.commands["plan"]
    assert isinstance(command, command_runtime.Command)
    assert command._explain(NoPlanError("nothing fits")) == ("Error: nothing fits", 1)


def test_interrupted_planning_advises_no_resume() -> None:
    command = cli.main.commands["plan"]
    assert isinstance(command, command_runtime.Command)
    assert command._explain(KeyboardInterrupt()) == ("interrupted", 130)
    assert command._explain(Terminated()) == ("stopped by SIGTERM", 143)


def test_bug_is_shown_with_its_traceback(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    import znnpy.inference

    def break_down(*args: object, **arguments: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(znnpy.inference, "infer_as_asked", break_down)
    with pytest.raises(ZeroDivisionError):
        place.infer()


def test_closed_pipe_gives_no_traceback(place: Place) -> None:
    program = Path(sys.executable).with_name("znnpy")
    done = subprocess.run(
        ["bash", "-c", f"'{program}' primitives --json | true; echo ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert done.stdout in ("0\n", "1\n")  # 0 when it was written before the pipe closed


def header(place: Place, blas: str) -> None:
    """Return the journal of an unfinished run whose products were those of `blas`."""
    head = JournalHeader({}, {"processor": processor()}, "", blas, 1)
    journal = Journal(journal_path(place.out))
    journal.create("0123456789abcdef", head)
    journal.close()


@pytest.mark.parametrize(
    ("blas", "asked"),
    [
        ("openblas Nehalem", "Nehalem"),
        ("openblas neoversen1", "neoversen1"),
        ("openblas unknown", None),
        ("openblas Haswell; rm", None),
        ("mkl Haswell", None),
        ("openblas", None),
    ],
)
def test_only_kernels_known_to_openblas_are_requested(
    place: Place, monkeypatch: pytest.MonkeyPatch, blas: str, asked: str | None
) -> None:
    monkeypatch.setenv("OPENBLAS_CORETYPE", "")
    monkeypatch.delenv("OPENBLAS_CORETYPE")
    header(place, blas)
    resumed_kernels._request_same_kernels(resumed_kernels._begun_here(place.out))
    assert os.environ.get("OPENBLAS_CORETYPE") == asked


def test_kernels_are_not_requested_on_another_processor(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_CORETYPE", "mine")
    header(place, "openblas Nehalem")
    monkeypatch.setattr(resumed_kernels, "processor", lambda: "another")
    resumed_kernels._request_same_kernels(resumed_kernels._begun_here(place.out))
    assert os.environ["OPENBLAS_CORETYPE"] == "mine"


def test_commands_are_click_commands() -> None:
    assert isinstance(cli.main, click.Group)
    expected = {"plan", "infer", "verify", "demo", "primitives", "graph", "import", "timeline", "measure", "info"}
    expected |= {"view", "report"}
    assert set(cli.main.commands) == expected
