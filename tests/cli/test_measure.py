"""`znnpy measure`, and plans with what it stored: used where it fits, refused whole where it does not, and said."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import Place
from tests.support.messages import assert_holds
from znnpy import measurement
from znnpy.costs import store
from znnpy.costs.cost_file import Costs, versions
from znnpy.costs.model import Rates, assumed_rates
from znnpy.costs.store import CostStore, stored_path
from znnpy.errors import OutputError
from znnpy.kernels.contract import Primitive, Variant
from znnpy.kernels.table import TABLE, find
from znnpy.layer_shapes import LayerShape
from znnpy.machine import Gpu, this_machine
from znnpy.planner.memory import baseline_bytes
from znnpy.planner.run_plan import RunPlan

pytestmark = pytest.mark.slow

H200 = Gpu("made up", (9, 0), 132, 140 * 2**30, 60 * 2**20, 227 * 2**10, 228 * 2**10, 4.8e12, 13000, ())


def here_truly(threads: int) -> Rates:
    """Half as fast as this machine is assumed to be; stages take as long to begin."""
    return assumed_rates(this_machine(), threads).scaled(0.5, 0.5)


class Clock:
    """A clock of a machine that is half as fast as this one; nothing runs."""

    threads = this_machine().cores

    def seconds(self, primitive: Primitive, shape: LayerShape, variant: Variant) -> float:
        return here_truly(self.threads).seconds(primitive, shape, variant)


@pytest.fixture
def here(place: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Make a place with its own cache, in which measuring takes no time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(place.folder / "cache"))

    @contextmanager
    def clock(*arguments: Any) -> Iterator[Clock]:
        yield Clock()

    monkeypatch.setattr(measurement, "_clock", clock)
    monkeypatch.setattr("znnpy.measure.survey.touching_rate", lambda threads, nbytes: 2.0**32)
    return place


def stored() -> Path:
    return stored_path(this_machine(), "cpu", this_machine().cores)


def change(path: Path, *keys: str, to: Any) -> None:
    content = json.loads(path.read_text())
    part = content
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = to
    path.write_text(json.dumps(content))


def planned(place: Place, *arguments: object) -> dict[str, Any]:
    result = place.run(
        "plan", place.folder / "net.yaml", "--volume", place.volume, "--json", "--device", "cpu", *arguments
    )
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def fitted(document: dict[str, Any]) -> list[bool]:
    """Return the fitted cost of every layer of a plan."""
    return [choice["fitted"] for choice in document["plan"]["workers"][0]["plan"]["stages"][0]["choices"]]


def test_measured_costs_are_stored_and_used_by_plans(here: Place) -> None:
    before = planned(here, "--cover", "patches")
    result = here.run("measure", "--device", "cpu")
    assert result.exit_code == 0
    for word in ("unit", "assumed", "measured", "runs", "product", "GFLOP/s", f"kept in {stored()}"):
        assert word in result.stdout.replace("\n", "")
    assert " layers, at most 120 s left" in result.stderr or " layers, at most 2 min left" in result.stderr
    costs = Costs.load(stored())
    assert costs.machine == this_machine()
    assert set(costs.units) >= {"product", "fft", "copy", "pool"}
    after = planned(here, "--cover", "patches")
    assert not any(fitted(before))
    assert all(fitted(after))
    assert "memory is first written to at 4 GiB/s (assumed: 1)" in result.stdout.replace("\n", " ")
    assert costs.first_touch == 2**32
    assert [one["plan"]["workers"][0]["plan"]["preparing_measured"] for one in (before, after)] == [False, True]
    one, other = (one["plan"]["workers"][0]["plan"]["preparing_seconds"] for one in (before, after))
    assert 0 < other < one
    made = RunPlan.from_json(json.dumps(after["plan"]))
    rates = here_truly(this_machine().cores)
    truly = sum(c.executions * rates.seconds(find(c.primitive), c.shape, c.variant) for c in made.choices)
    truly += made.main.memory.last.prepared / 2**32
    assert after["seconds"] == pytest.approx(truly, rel=0.01)
    assert after["seconds"] - other > 1.2 * (before["seconds"] - one)
    assert after["notes"] == before["notes"] == []
    text = here.run("plan", here.folder / "net.yaml", "--volume", here.volume, "--device", "cpu").stdout
    assert "is estimated from rates measured on this machine" in text.replace("\n", " ")


def test_network_layers_are_measured_as_its_plans_run_them(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "SHAPE", (30, 31, 32))
    document = json.loads(here.run("measure", here.folder / "net.yaml", "--device", "cpu", "--json").stdout)
    assert document["layers"] == len(Costs.load(stored()).layers) > 0
    assert document["path"] == str(stored())
    assert any(choice["measured"] for choice in planned(here)["plan"]["workers"][0]["plan"]["stages"][0]["choices"])
    assert document["units"], "the machine was not measured before"
    deeper = json.loads(here.run("measure", here.folder / "net.yaml", "--device", "cpu", "--json").stdout)
    assert (deeper["units"], deeper["layers"]) == ({}, 0), "nothing is measured again"
    said = here.run("measure", here.folder / "net.yaml", "--device", "cpu").stdout.replace("\n", " ")
    assert "0 layers of the network's plans measured in" in said
    again = json.loads(here.run("measure", "--device", "cpu", "--json").stdout)
    assert again["layers"] == 0
    assert again["units"] == document["units"]
    assert len(Costs.load(stored()).layers) == document["layers"], "kept by the next measurement"


def test_costs_of_a_calibration_are_replaced(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "SHAPE", (30, 31, 32))
    here.run("measure", "--device", "cpu")
    full = Costs.load(stored())
    slower = {unit: replace(speed, flops=speed.flops / 2) for unit, speed in full.units.items()}
    stored().unlink()
    CostStore().keep(replace(full, units=slower, calibrated=True))
    assert not stored().exists()
    document = json.loads(here.run("measure", here.folder / "net.yaml", "--device", "cpu", "--json").stdout)
    assert set(document["units"]) == set(full.units), "the machine is measured as if it never was"
    costs = Costs.load(stored())
    assert (costs.units, costs.calibrated) == (full.units, False)


def test_measurements_are_kept_if_the_network_has_no_plan(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "SHAPE", (9, 12, 11))
    ram = 2**20 * 16 + baseline_bytes()
    result = here.run("measure", here.folder / "net.yaml", "--device", "cpu", "--ram", ram)
    assert result.exit_code == 1
    assert "nothing fits in " in result.stderr
    assert Costs.load(stored()).layers == ()


def test_inaccessible_cache_is_left_alone(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is stored there."""
    assert here.run("measure", "--device", "cpu").exit_code == 0
    stat = os.stat

    def refusing(path: Any, *arguments: Any, **more: Any) -> os.stat_result:
        if Path(os.fsdecode(path)) == stored():
            raise PermissionError(13, "Permission denied")
        return stat(path, *arguments, **more)

    monkeypatch.setattr(os, "stat", refusing)
    assert not any(fitted(planned(here)))


def test_each_number_of_threads_has_its_own_costs(here: Place) -> None:
    assert here.run("measure", "--device", "cpu", "--threads", 1).exit_code == 0
    assert all(fitted(planned(here, "--threads", 1)))
    assert not any(fitted(planned(here, "--threads", 3)))


@pytest.mark.parametrize(
    ("keys", "to", "said"),
    [
        (("machine", "blas"), "mkl none", "BLAS was mkl none and is "),
        (("machine", "versions"), [["numpy", "0.1"]], "numpy was 0.1 and is "),
        (("primitives", "cpu.conv.direct"), 99, "the version of cpu.conv.direct was 99 and is "),
        (("format",), 99, "this is a cost file of format 99"),
        (("threads",), "two", "the costs are damaged: threads: "),
    ],
)
def test_stale_or_damaged_costs_are_ignored_with_a_warning(
    here: Place, keys: tuple[str, ...], to: Any, said: str
) -> None:
    assert here.run("measure", "--device", "cpu").exit_code == 0
    change(stored(), *keys, to=to)
    document = planned(here)
    (note,) = document["notes"]
    assert note.startswith("stored costs of the CPU are not used: ")
    assert said in note
    assert "measure again with `znnpy measure" in note
    assert not any(fitted(document))
    result = here.infer("--device", "cpu", "--json")
    assert result.exit_code == 0
    assert note in json.loads(result.stdout)["warnings"]


def test_named_cost_file_that_does_not_fit_is_refused(here: Place) -> None:
    mine, net = here.folder / "mine.json", here.folder / "net.yaml"
    assert here.run("measure", "--device", "cpu", "--out", mine).exit_code == 0
    assert not stored().exists()
    assert not any(fitted(planned(here)))
    assert all(fitted(planned(here, "--costs", mine)))
    assert here.infer("--costs", mine).exit_code == 0
    here.out.unlink()
    change(mine, "machine", "processor", to="another")
    sentence = f"the costs in {mine} do not fit: the processor was another and is {this_machine().processor} here; "
    for arguments in (("plan", net, "--costs", mine), (*here.arguments, "--costs", mine)):
        assert here.refusal(*arguments) == sentence + "leave --costs out, or measure again with `znnpy measure`"
    mine.write_text("{")
    assert here.refusal("plan", net, "--costs", mine).startswith(f"{mine}: the costs are damaged or cut off: ")
    mine.write_text('{"format": 7}')
    assert "this is a cost file of format 7, and this version reads" in here.refusal(*here.arguments, "--costs", mine)
    assert here.refusal("plan", "--costs", "none.json").startswith("no cost file none.json; write one with")


def test_contradicting_options_are_usage_errors(here: Place) -> None:
    for arguments, said in (
        (
            ("plan", "--machine", "b", "--mode", "side-by-side"),
            "--machine names the costs of one device: omit --mode side",
        ),
        (("plan", "--costs", "a", "--machine", "b"), "--machine names a file that holds the costs of that machine"),
        (("infer", "v.h5", "--plan", "p.json", "--costs", "c"), "--costs is fixed by the plan"),
        (("measure", "--overwrite"), "--overwrite replaces the files given as --export and --out"),
        (("measure", "--minutes", "0"), "0.0 is not a positive number"),
    ):
        result = here.run(*arguments)
        assert result.exit_code == 2
        assert said in result.stderr


def test_existing_file_is_replaced_only_with_overwrite(here: Place) -> None:
    there = here.folder / "there.json"
    there.write_text("mine")
    for option in ("--out", "--export"):
        assert here.refusal("measure", option, there).startswith(f"{there} exists already; give another {option}")
        gone = here.folder / "gone" / "a.json"
        assert here.refusal("measure", option, gone).startswith(f"{gone.parent} is not a folder; give another {option}")
    assert here.run("measure", "--device", "cpu", "--export", there, "--overwrite").exit_code == 0
    assert Costs.load(there) == Costs.load(stored())


def test_resumed_run_refuses_other_costs(here: Place) -> None:
    assert here.run("measure", "--device", "cpu", "--out", here.folder / "c.json").exit_code == 0
    from znnpy.run.resume import check_options
    from znnpy.shared_options import RunOptions

    made = RunPlan.from_json(json.dumps(planned(here)["plan"]))
    wishes = RunOptions(costs=here.folder / "c.json")
    with pytest.raises(ValueError, match="the run began with a plan, which `costs` would change"):
        check_options(wishes, type("Begun", (), {"settings": {"only": []}})(), made)


def exported(here: Place, **changes: Any) -> Path:
    """Write the cost file of another machine."""
    path = here.folder / "there.json"
    assert here.run("measure", "--device", "cpu", "--out", path).exit_code == 0
    costs = Costs.load(path)
    machine = replace(costs.machine, processor="another", ram_bytes=2**40)
    path.write_text(replace(costs, **{"machine": machine, **changes}).to_json())
    return path


def test_plan_for_another_machine_runs_only_there(here: Place) -> None:
    path, plan = exported(here), here.folder / "plan.json"
    arguments = ("plan", here.folder / "net.yaml", "--volume", here.volume, "--machine", path)
    result = here.run(*arguments, "--out", plan)
    assert result.exit_code == 0
    assert "for another machine, another" in result.stdout
    made = RunPlan.load(plan)
    assert made.made_for == "another"
    assert made.fitted
    assert made.limits.ram_bytes == int(0.75 * 2**40)
    sentence = here.refusal(*here.arguments, "--plan", plan)
    assert_holds(sentence, "made for another machine (another)", "`znnpy plan`, without --machine")
    assert not here.out.exists()
    assert json.loads(here.run(*arguments, "--json").stdout)["plan"]["made_for"] == "another"


def test_threads_other_than_the_cost_files_are_refused(here: Place) -> None:
    """The advice is about the named file."""
    net, path = here.folder / "net.yaml", exported(here)
    threads = this_machine().cores
    differs = f"the number of threads was {threads} and is 7"
    arguments = ("plan", net, "--shape", "30,30,30", "--threads", 7, "--device", "cpu")
    refused = here.refusal(*arguments, "--machine", path)
    assert_holds(refused, path, differs, "leave --threads out", "`znnpy measure --threads 7 --export FILE`")
    mine = here.folder / "mine.json"
    assert here.run("measure", "--device", "cpu", "--out", mine).exit_code == 0
    refused = here.refusal(*arguments, "--costs", mine)
    assert_holds(
        refused, mine, differs, f"give --threads {threads}", "leave --costs out", "`znnpy measure --threads 7`"
    )


def test_cost_file_of_other_methods_asks_for_a_new_measurement(here: Place) -> None:
    path = exported(here)
    change(path, "primitives", "cpu.conv.direct", to=99)
    sentence = here.refusal("plan", here.folder / "net.yaml", "--shape", "30,30,30", "--machine", path)
    assert "the version of cpu.conv.direct was 99 and is " in sentence
    assert "`znnpy measure --export FILE`" in sentence


def test_plan_for_this_machine_is_refused_for_another(here: Place) -> None:
    path, plan = here.folder / "here.json", here.folder / "plan.json"
    assert here.run("measure", "--device", "cpu", "--export", path).exit_code == 0
    arguments = ("plan", here.folder / "net.yaml", "--volume", here.volume, "--machine", path, "--out", plan)
    assert here.run(*arguments).exit_code == 0
    assert RunPlan.load(plan).made_for is None
    assert here.infer("--plan", plan).exit_code == 0


def test_plan_for_an_absent_gpu_is_made_from_its_cost_file(here: Place) -> None:
    costs = Costs.load(exported(here))
    there = replace(
        costs,
        device="gpu",
        threads=1,
        first_touch=None,
        machine=replace(costs.machine, gpu=H200),
        primitives=versions(replace(costs.machine, gpu=H200), "gpu", TABLE),
        units={"gpu_stream": replace(costs.units["copy"], nbytes=1e12)},
    )
    path, plan = here.folder / "card.json", here.folder / "plan.json"
    path.write_text(there.to_json())
    arguments = ("plan", here.folder / "net.yaml", "--volume", here.volume, "--machine", path)
    assert here.run(*arguments, "--out", plan).exit_code == 0
    made = RunPlan.load(plan)
    assert made.device == "gpu"
    assert made.made_for == "made up beside another"
    assert made.limits.vram_bytes == int(0.9 * H200.memory_bytes)
    sentence = here.refusal(*here.arguments, "--plan", plan)
    assert sentence.startswith("the plan was made for another machine (made up beside another)")
    sentence = here.refusal(*arguments, "--device", "cpu")
    assert_holds(sentence, path, "made up beside another", "--device cpu")


def test_unwritable_cost_file_leaves_nothing(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert here.run("measure", "--device", "cpu").exit_code == 0
    before = stored().read_bytes()

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OutputError, match=r"cannot write the costs .*: No space left on device"):
        store.write_costs(stored(), Costs.load(stored()), overwrite=True)
    assert stored().read_bytes() == before
    assert [path.name for path in stored().parent.glob("costs-*")] == [stored().name]
