"""`znnpy plan --rigor`, and `--paranoid` of plans and runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.cli import Place
from znnpy import planning, verify
from znnpy.costs.model import assumed_rates
from znnpy.errors import DeviceError
from znnpy.kernels.contract import Primitive, Variant
from znnpy.kernels.table import find
from znnpy.layer_shapes import LayerShape
from znnpy.machine import this_machine
from znnpy.measure import rigor
from znnpy.measure.layer_bench import HostLayer, Position
from znnpy.planner.run_plan import RunPlan

pytestmark = pytest.mark.slow


class Clock:
    """A clock of a machine that is half as fast as this one; nothing runs."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses

    def seconds(self, primitive: Primitive, shape: LayerShape, variant: Variant) -> float:
        if primitive.name == self.refuses:
            raise DeviceError("not today")
        return assumed_rates(this_machine(), 2).scaled(0.5, 0.5).seconds(primitive, shape, variant)


def timed_by(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def timer_on(*arguments: Any) -> Iterator[Clock]:
        yield clock

    monkeypatch.setattr(rigor, "timer_on", timer_on)


@pytest.fixture(autouse=True)
def _empty_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every test begin without measured costs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def arguments(place: Place, *more: object) -> tuple[object, ...]:
    where = ("--volume", place.volume, "--device", "cpu", "--threads", 2, "--cover", "patches")
    return ("plan", place.folder / "net.yaml", *where, *more)


def choices_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the choices of the first stage in the JSON of a plan."""
    choices: list[dict[str, Any]] = document["plan"]["workers"][0]["plan"]["stages"][0]["choices"]
    return choices


@pytest.mark.parametrize("asked", ["measure", "exhaustive"])
def test_layers_are_timed_before_the_plan_is_printed(place: Place, monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    timed_by(Clock(), monkeypatch)
    file = place.folder / "plan.json"
    result = place.run(*arguments(place, "--rigor", asked, "--out", file))
    assert result.exit_code == 0, result.stderr
    said = " ".join(result.stdout.split())
    assert "every layer was measured on the machine the plan was made on, at this size or at others" in said
    made = RunPlan.load(file)
    assert made.rigor == asked
    assert all(choice.measured for choice in made.choices)
    truth = assumed_rates(this_machine(), 2).scaled(0.5, 0.5)
    for choice in made.choices:
        primitive = find(choice.primitive)
        assert choice.seconds == pytest.approx(truth.seconds(primitive, choice.shape, choice.variant), rel=0.01)
    left = r" layers, at most [\d.]+ s left, cpu\." if asked == "measure" else r" layers, cpu\."
    assert re.search(left, result.stderr)
    assert (
        RunPlan.from_json(json.dumps(json.loads(place.run(*arguments(place, "--json")).stdout)["plan"])).rigor
        == "estimate"
    )


def test_failing_primitive_is_named_with_its_reason(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    first = choices_of(json.loads(place.run(*arguments(place, "--json")).stdout))[0]["primitive"]
    timed_by(Clock(refuses=first), monkeypatch)
    document = json.loads(place.run(*arguments(place, "--json", "--rigor", "measure")).stdout)
    assert first not in {choice["primitive"] for choice in choices_of(document)}
    assert "not today" in {row["why"] for row in document["why_not"] if row["primitive"] == first}


def test_time_limit_is_noted_with_the_number_of_measured_layers(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    timed_by(Clock(), monkeypatch)
    document = json.loads(
        place.run(*arguments(place, "--json", "--rigor", "exhaustive", "--time-limit", "1e-6")).stdout
    )
    (note,) = document["notes"]
    assert note.startswith("the time limit of 1e-06 s was up after 0 layers were measured")
    assert document["plan"]["rigor"] == "measure"
    assert not any(choice["measured"] for choice in choices_of(document))


def test_contradicting_options_are_usage_errors(place: Place) -> None:
    for some, said in (
        (("--time-limit", 5), "--time-limit limits how long layers are timed: give --rigor measure or exhaustive"),
        (("--rigor", "measure", "--time-limit", 0), "0.0 is not a positive number"),
        (("--rigor", "patient"), "'patient' is not one of 'estimate', 'measure', 'exhaustive'"),
        (
            ("--machine", "m.json", "--rigor", "measure"),
            "--rigor and --paranoid run layers on this machine: omit them, or omit --machine",
        ),
        (
            ("--machine", "m.json", "--paranoid"),
            "--rigor and --paranoid run layers on this machine: omit them, or omit --machine",
        ),
    ):
        result = place.run(*arguments(place, *some))
        assert result.exit_code == 2
        assert said in " ".join(result.stderr.replace("│", "").split())
    with pytest.raises(ValueError, match="layers run on the machine that is here"):
        planning.plan(place.folder / "net.yaml", machine="m.json", paranoid=True)


def test_paranoid_plan_checks_every_layer(place: Place) -> None:
    result = place.run(*arguments(place, "--paranoid", "--json"))
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["plan"]["rigor"] == "estimate"
    assert "layers, checking cpu." in result.stderr


def test_wrong_layer_is_one_sentence(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    right = HostLayer.at

    def at(self: HostLayer, position: Position) -> Any:
        return right(self, position) + 1e-3

    monkeypatch.setattr(HostLayer, "at", at)
    file = place.folder / "plan.json"
    result = place.run(*arguments(place, "--paranoid", "--out", file))
    assert result.exit_code == 1
    last = result.stderr.strip().splitlines()[-1]
    assert re.match(
        r"Error: layers? 0 .*\(conv 1x5x2 -> 3 relu\) run by \S+.* gives [\d.]+ at \(image, z, y, x\) = ", last
    )
    assert ", of random values, and by definition it is " in last
    assert not file.exists()


def test_paranoid_run_compares_patches_with_the_definition(place: Place) -> None:
    assert place.infer("--device", "cpu").exit_code == 0
    plain = place.out.read_bytes()
    result = place.infer("--device", "cpu", "--overwrite", "--paranoid")
    assert result.exit_code == 0, result.stderr
    assert len(place.out.read_bytes()) == len(plain)
    for more in (
        ("--roi", "2:20,3:22,0:25", "--border", "reflect"),
        ("--output-dtype", "uint8"),
        ("--cover", "columns"),
    ):
        assert place.infer("--device", "cpu", "--overwrite", "--paranoid", *more).exit_code == 0


def test_wrong_patch_stops_the_run(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = verify.by_definition

    def off(*of: Any) -> Any:
        return exact(*of) + np.float64(1e-3)

    monkeypatch.setattr(verify, "by_definition", off)
    result = place.infer("--device", "cpu", "--paranoid")
    assert result.exit_code == 1
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error")]
    assert line.startswith("Error: output voxel (z, y, x) = (")
    assert "find the layer with `znnpy plan --paranoid`, and report it (output voxels (z, y, x) = (" in line
    assert not place.out.exists()
