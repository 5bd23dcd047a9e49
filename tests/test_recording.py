"""A record of a run holds what it measured over time, in bounded memory, beside what the plan predicted."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.support.cli import Place
from tests.support.messages import assert_holds
from tests.support.small_unet import written
from znnpy.computation import trace_of
from znnpy.dry_run import dry_run
from znnpy.errors import OutputError, PlanFileError
from znnpy.inference import infer, infer_as_asked
from znnpy.opened_run import named_run
from znnpy.options import InferOptions
from znnpy.pages.run_page import run_page
from znnpy.recording import FIRST_SECONDS, Figures, Recorder, recorder_of
from znnpy.report.trace_reader import Span, read_spans
from znnpy.run_record import INTERVALS, RunRecord


def record_of(place: Place, name: str = "run.json", **options: Any) -> RunRecord:
    path = place.folder / name
    how = {"device": "cpu", "threads": 1, "calibrate": False, "patch": (4, 4, 4), "out": place.out, "record": path}
    infer(place.volume, place.folder / "net.yaml", **{**how, **options})
    return RunRecord.load(path)


# --- figures over time ---


def test_figures_of_a_short_run_are_kept_as_they_are() -> None:
    figures = Figures()
    for number, nbytes in enumerate([5, 9, 7]):
        figures.add_memory((number + 0.5) * FIRST_SECONDS, nbytes)
        figures.add_voxels((number + 0.5) * FIRST_SECONDS, 10 * number)
    found = figures.over_time()
    assert (found.seconds, found.memory, found.voxels) == (FIRST_SECONDS, (5, 9, 7), (0, 10, 20))


def test_intervals_that_were_left_out_hold_the_value_before() -> None:
    figures = Figures()
    figures.add_memory(0.5 * FIRST_SECONDS, 5)
    figures.add_memory(3.5 * FIRST_SECONDS, 8)
    assert figures.over_time().memory == (5, 5, 5, 8)


def test_spans_are_divided_among_intervals() -> None:
    figures = Figures()
    width = FIRST_SECONDS
    figures.add_span("CPU", 0.5 * width, 2.25 * width, None)
    figures.add_span("CPU", 2.5 * width, 2.75 * width, None)
    figures.add_span("writer", 1.0 * width, 1.5 * width, None)
    busy = {track: [spent / width for spent in spans] for track, spans in figures.over_time().busy.items()}
    assert busy["CPU"] == pytest.approx([0.5, 1.0, 0.5])
    assert busy["writer"] == pytest.approx([0.0, 0.5])


def test_figures_of_a_long_run_take_no_more_room() -> None:
    """Intervals double: the largest memory, the last count of voxels, and the sums of seconds stay."""
    figures = Figures()
    steps, seconds = 3000, 7.0
    for number in range(steps):
        at = number * seconds
        figures.add_memory(at, 5000 if number == 7 else 1000)
        figures.add_voxels(at, number)
        figures.add_span("CPU", at, at + seconds / 2, layer=number % 2)
    found = figures.over_time()
    assert all(len(series) <= INTERVALS for series in (found.memory, found.voxels, found.busy["CPU"]))
    assert len(found.memory) > INTERVALS / 2
    assert found.seconds * len(found.memory) >= seconds * (steps - 1)
    assert max(found.memory[:2]) == 5000
    assert set(found.memory[2:]) == {1000}
    assert found.voxels[-1] == steps - 1
    assert list(found.voxels) == sorted(found.voxels)
    assert sum(found.busy["CPU"]) == pytest.approx(steps * seconds / 2)
    assert figures.of_layers == {("CPU", layer): pytest.approx(steps * seconds / 4) for layer in (0, 1)}


@pytest.mark.parametrize("jump", [10.3, 41.0, 1000.0])
def test_a_value_that_doubles_the_intervals_is_kept(jump: float) -> None:
    figures = Figures()
    figures.add_voxels(5.0, 50)
    figures.add_voxels(jump, 100)
    figures.add_memory(5.0, 7)
    figures.add_memory(50.0 * jump, 9)
    found = figures.over_time()
    assert (found.voxels[-1], found.memory[-1]) == (100, 9)


def test_figures_take_spans_from_many_threads() -> None:
    figures = Figures()

    def add(track: str) -> None:
        for number in range(2000):
            figures.add_span(track, number * 0.01, number * 0.01 + 0.005, 0)

    threads = [threading.Thread(target=add, args=(f"CPU {number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    busy = figures.over_time().busy
    assert [sum(spent) for spent in busy.values()] == [pytest.approx(10.0)] * 4


def test_memory_is_watched_until_the_context_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("znnpy.recording.SAMPLE_SECONDS", 0.005)
    recorder = Recorder(tmp_path / "run.json", InferOptions("volume.h5"))
    before = threading.active_count()
    with recorder.watching_memory():
        time.sleep(0.1)
        held = np.ones(2**24)  # 128 MiB, which the C library asks the system for
        time.sleep(0.1)
        del held
    assert threading.active_count() == before
    memory = recorder._figures.over_time().memory
    assert len(memory) >= 3
    assert max(memory) > memory[0] + 2**26


# --- a run ---


@pytest.mark.slow
def test_record_of_a_run(place: Place) -> None:
    record = record_of(place, roi="0:18,0:21,0:23")
    report = record.report
    assert (record.volume, record.output) == (str(place.volume), str(place.out))
    assert record.arguments == {
        "volume": str(place.volume),
        "network": str(place.folder / "net.yaml"),
        "out": str(place.out),
        "device": "cpu",
        "threads": 1,
        "calibrate": False,
        "patch": (4, 4, 4),
        "roi": "0:18,0:21,0:23",
    }
    assert not record.in_python
    assert report.voxels == report.computed == np.prod(report.shape) == 13 * 14 * 17
    assert report.predicted_seconds > 0
    assert report.peak_bytes > 0
    assert report.device == "CPU"
    assert record.layers[0].name.startswith("0 conv")
    assert all(layer.measured > 0 for layer in record.layers)
    assert all(layer.primitive.startswith("cpu.") for layer in record.layers)
    over_time = record.over_time
    assert over_time.voxels[-1] == report.voxels
    assert 2**20 < max(over_time.memory) <= report.peak_bytes * 1.01
    assert {"CPU", "CPU reading", "writer"} <= set(over_time.busy)
    assert sum(over_time.busy["CPU"]) >= sum(layer.measured for layer in record.layers)
    assert len(over_time.memory) * over_time.seconds == pytest.approx(report.seconds, abs=0.3)
    assert record.lines[0].startswith(str(place.out))
    assert "predicted: " in "\n".join(record.plan)
    assert record.machine.cores >= 1


@pytest.mark.slow
def test_a_record_keeps_that_missing_voxels_are_nan(place: Place) -> None:
    record = record_of(place, fill_missing=float("nan"))
    assert record.arguments["fill_missing"] == "nan"
    assert "--fill-missing nan" in run_page(str(place.folder / "run.json"))


@pytest.mark.slow
def test_layers_take_as_long_as_the_trace_says(place: Place) -> None:
    trace = place.folder / "trace.json"
    record = record_of(place, trace=trace)
    spans = [span for span in read_spans(trace) if isinstance(span, Span)]
    in_trace = sum(span.end - span.begin for span in spans if "layer" in span.facts)
    assert sum(layer.measured for layer in record.layers) == pytest.approx(in_trace, rel=1e-3)
    assert {span.track for span in spans} == set(record.over_time.busy)


@pytest.mark.slow
@pytest.mark.parametrize("windows", [{}, {"window": (16, 16, 16)}])
def test_graphs_and_windows_are_recorded_by_their_nodes(tmp_path: Path, windows: dict[str, Any]) -> None:
    network, path = written(tmp_path), tmp_path / "run.json"
    infer(
        tmp_path / "volume.npy", network, out=tmp_path / "out.h5", record=path, device="cpu", calibrate=False, **windows
    )
    layers = RunRecord.load(path).layers
    assert [layer.name.split()[0] for layer in layers] == ["enter", "down", "deep", "up", "leave"]
    assert all(layer.measured > 0 and layer.predicted > 0 for layer in layers)


@pytest.mark.slow
def test_recording_changes_no_voxel(place: Place) -> None:
    record_of(place)
    recorded = place.prediction()
    infer(place.volume, place.folder / "net.yaml", out=place.out, overwrite=True, device="cpu", patch=(4, 4, 4))
    np.testing.assert_array_equal(place.prediction(), recorded)


@pytest.mark.slow
def test_resumed_run_records_its_own_part(place: Place) -> None:
    def stop(event: Any) -> None:
        if 0 < event.voxels_done < event.voxels:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record_of(place, progress=stop, cover="patches")
    assert not (place.folder / "run.json").exists()
    record = record_of(place, resume=True, patch=None)
    assert 0 < record.report.computed < record.report.voxels
    assert record.over_time.voxels[0] > 0
    assert sum(layer.predicted for layer in record.layers) < 1.01 * record.report.predicted_seconds
    assert "resume" not in record.arguments
    complete = record_of(place, "again.json", resume=True, patch=None)
    assert complete.report.computed == 0
    assert complete.lines[0].endswith("complete already: nothing to do")


@pytest.mark.slow
def test_arrays_of_the_caller_are_described(place: Place) -> None:
    volume = np.random.default_rng(0).integers(0, 255, (14, 15, 16), np.uint8)
    out = np.empty((2, 9, 8, 10), np.float32)
    path = place.folder / "run.json"
    infer(volume, place.folder / "net.yaml", out=out, record=path, device="cpu", calibrate=False)
    record = RunRecord.load(path)
    assert record.in_python
    assert record.arguments["volume"] == record.arguments["out"] == "<ndarray>"


# --- what is refused ---


def test_record_has_the_suffix_of_json(place: Place) -> None:
    with pytest.raises(OutputError, match=r"run\.txt does not end in \.json: give a `record` that does"):
        record_of(place, record=place.folder / "run.txt")


@pytest.mark.slow
def test_existing_files_are_replaced_only_with_overwrite(place: Place) -> None:
    record_of(place)
    place.out.unlink()
    before = (place.folder / "run.json").read_bytes()
    with pytest.raises(OutputError, match="exists already; give another `record`, or overwrite=True"):
        record_of(place)
    assert (place.folder / "run.json").read_bytes() == before
    assert record_of(place, overwrite=True).format == 1


@pytest.mark.parametrize("role", ["volume", "source of the volume", "network", "weights", "plan", "costs", "mask"])
@pytest.mark.parametrize("file", ["record", "trace"])
def test_what_a_run_reads_is_not_replaced(place: Place, file: str, role: str) -> None:
    path = place.folder / "input.json"
    path.write_text("{}")
    written_there: dict[str, Any] = {file: path}
    named = named_run(InferOptions(place.volume, place.folder / "net.yaml", overwrite=True, mask=path, **written_there))
    assert named.inputs["mask"] == path
    named.inputs.clear()
    named.inputs[role] = [path] if role in ("weights", "source of the volume") else path
    with pytest.raises(OutputError, match=f"is the {role} .* itself; give another name as `{file}`"):
        (recorder_of if file == "record" else trace_of)(named)


def test_files_that_only_the_opened_volume_names_are_not_replaced(place: Place) -> None:
    """A volume whose voxels are in a file of their own."""
    raw = place.folder / "voxels.json"
    raw.write_bytes(np.random.default_rng(3).integers(0, 256, (20, 23, 25), np.uint8).tobytes())
    with h5py.File(place.volume, "w") as written_anew:
        external = [(str(raw), 0, h5py.h5f.UNLIMITED)]
        written_anew.create_dataset("raw", (20, 23, 25), np.uint8, external=external)
    before = raw.read_bytes()
    asked = InferOptions(place.volume, place.folder / "net.yaml", out=place.out, record=raw, overwrite=True)
    for run in (infer_as_asked, dry_run):
        with pytest.raises(OutputError, match=r"is the source of the volume .* itself; give another name as `record`"):
            run(asked)
        assert raw.read_bytes() == before
        assert not place.out.exists()


@pytest.mark.parametrize("way", [{"cluster": "local:2"}, {"part": "1/2"}, {"finish": True}])
def test_record_is_of_one_process(way: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"record is of a run by one process, and {next(iter(way))} is of several"):
        InferOptions("volume.h5", record="run.json", **way)


def edited(record: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    document = json.loads(record.read_text())
    change(document)
    record.write_text(json.dumps(document))
    return record


@pytest.mark.slow
def test_damaged_records_are_refused(place: Place) -> None:
    record_of(place)
    path = place.folder / "run.json"
    whole = path.read_text()
    cases: dict[str, Callable[[dict[str, Any]], object]] = {
        "report.seconds": lambda d: d["report"].update(seconds=-1.0),
        "over_time.memory": lambda d: d["over_time"].update(memory=[1.0] * (INTERVALS + 1)),
        "layers": lambda d: d.pop("layers"),
        "more": lambda d: d.update(more=1),
        "format 1": lambda d: d.update(format=2),
    }
    for word, change in cases.items():
        path.write_text(whole)
        with pytest.raises(PlanFileError) as caught:
            RunRecord.load(edited(path, change))
        assert_holds(caught.value, path, word, "znnpy infer VOLUME --record run.json")
    path.write_text(whole[: len(whole) // 2])
    with pytest.raises(PlanFileError, match="cut off"):
        RunRecord.load(path)
    with pytest.raises(PlanFileError, match="no record of a run"):
        RunRecord.load(place.folder / "gone.json")
