"""Damaged networks, weights, plans, costs, traces and wisdom, from fixed seeds: each ends in a value or a sentence.

A small part always runs; all of it is marked `long`. Files that FFTW might see are read in child processes, because it
ends a process that it is given some damaged wisdom in.
"""

from __future__ import annotations

import io
import json
import random
import resource
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from tests.costs.test_cost_file import TABLE as COSTS_TABLE
from tests.costs.test_cost_file import costs
from tests.support.brute_force import planned, planned_on_gpu
from tests.support.damage import VALUES, damaged_bytes, damaged_json, damaged_text, ended
from tests.support.fake_plans import MIXED, WIDE, in_parts, patches, walking
from tests.support.fake_primitives import FAKES, MACHINE, WITH_GPU
from znnpy.costs.cost_file import Costs, Measurement
from znnpy.costs.samples import samples
from znnpy.formats.weights import random_weights, read_weights
from znnpy.kernels.table import IN_HOST_RAM, TABLE
from znnpy.machine import Machine
from znnpy.network import Conv, Network, Pool
from znnpy.network_files import SHIPPED, read_network
from znnpy.option_values import DeviceKind
from znnpy.planner.run_plan import RunPlan
from znnpy.planner.validate import check_runs
from znnpy.report.plan_text import explain
from znnpy.report.trace_reader import read_spans
from znnpy.run.trace import Trace
from znnpy.timeline import read_timeline

pytestmark = pytest.mark.slow

MOST_GROWTH = 200 * 2**20  # bytes of the process, over all cases of a test


def seeds(few: int, all_: int) -> pytest.MarkDecorator:
    """Return a range of seeds: `few` that always run, and the rest of `all_`, marked `long`."""
    long = pytest.param(range(few, all_), id=f"{all_ - few}", marks=pytest.mark.long)
    return pytest.mark.parametrize("numbers", [pytest.param(range(few), id=f"{few}"), long])


@pytest.fixture(autouse=True)
def _bounded_memory() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_GROWTH


def judge(numbers: range, read: Callable[[random.Random], Callable[[], object]], path: Path | None = None) -> None:
    """One case for each number; some have to be refused, or nothing was damaged."""
    refused = 0
    for number in numbers:
        rng = random.Random(number)
        refused += not ended(read(rng), str(path) if path else "")
    assert refused > len(numbers) // 10


YAML = """name: fuzzed
description: 2026-11-20
input_channels: 3
normalise: {mean: [1, 2.5, -3e1], std: 1e-3}
weights: sub/w.npz
layers:
- &first {type: conv, kernel: [1, 2, 3], out: 4, activation: softmax}
- *first
- type: pool
  window: &two [2, 1, 2]
- {type: maxfilter, window: *two}
- {type: maxout, of: 2}
"""
YAML_WORDS = (
    *(
        "&a ",
        "*a",
        "*first",
        "<<: *first",
        "? ",
        "- ",
        "[",
        "]",
        "{",
        "}",
        ": ",
        ", ",
        "|\n",
        ">\n ",
        "'",
        '"',
        "!",
        "!!int ",
    ),
    *(
        "%YAML 1.1\n---\n",
        "---\n",
        "...\n",
        "\t",
        "\r",
        "#",
        "`",
        "@",
        "\\",
        '"\\U00110000"',
        '"\\x1b"',
        "\x1b[2J",
        "\x00",
    ),
    *("\ufeff", "\u2028", "\u202e", "\ud7ff", "010", "1:30", "0x", "0o9", "1e999", "-.inf", ".nan", "yes", "~", "null"),
    *("9" * 400, "n" * 5000, "[" * 40, "{a: " * 20, "- " * 30, "&b [*b]", "- *first\n" * 999, "[*two, *two, *two]"),
)


@seeds(60, 1500)
def test_damaged_networks_give_a_network_or_a_sentence(numbers: range, tmp_path: Path) -> None:
    path = tmp_path / "net.yaml"

    def read(rng: random.Random) -> Callable[[], object]:
        damaged = damaged_text(YAML, YAML_WORDS, rng).encode("utf-8", "surrogatepass")
        path.write_bytes(damaged_bytes(damaged, rng) if rng.random() < 0.2 else damaged)
        return lambda: read_network(path)

    judge(numbers, read, path)


@seeds(20, 400)
def test_damaged_znni_networks_give_a_network_or_a_sentence(numbers: range, tmp_path: Path) -> None:
    path = tmp_path / "net.znni"
    whole = "INPUTS:1, LAYERS:3\nCONV 2,3,4 8\nPOOL 2,2,2\nMAXOUT 2\n"
    words = ("9" * 30, "1000001", "0", "-1", ",", ":", "FOOL 1,1", "CONV", "\x1b[2J", "\u2028", "POOL 2,2,2\n" * 2000)

    def read(rng: random.Random) -> Callable[[], object]:
        path.write_bytes(damaged_text(whole, words, rng).encode())
        return lambda: read_network(path)

    judge(numbers, read, path)


SMALL = Network("tiny", 1, (Conv((1, 2, 3), 4, "relu"), Pool((2, 2, 2)), Conv((1, 1, 2), 3)))


def arrays() -> dict[str, Any]:
    pairs = enumerate(random_weights(SMALL, seed=5))
    return {f"conv{i}_{part}": getattr(one, part) for i, one in pairs for part in ("weight", "bias")}


def npy(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


@pytest.mark.filterwarnings("ignore:Duplicate name")
@seeds(60, 1200)
def test_damaged_npz_weights_give_weights_or_a_sentence(numbers: range, tmp_path: Path) -> None:
    """Damage half of the archives within a member whose checksum is right."""
    path = tmp_path / "w.npz"
    members = {f"{name}.npy": npy(array) for name, array in arrays().items()}
    words = ("(", "[", "-", "True", "9" * 25, "'", "{", "}", "<f8", "|O", "\x1b", ", ", "L", "None", "(" * 500)

    def read(rng: random.Random) -> Callable[[], object]:
        kind, chosen = rng.randrange(4), rng.choice(list(members))
        with zipfile.ZipFile(path, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
            for name, content in members.items():
                damaged = content
                if name == chosen and kind == 0:
                    damaged = damaged_bytes(content, rng)
                if name == chosen and kind == 1:
                    header = damaged_text(content[10:128].decode(), words, rng).encode()
                    damaged = content[:8] + len(header).to_bytes(2, "little") + header + content[128:]
                archive.writestr(name, damaged)
            if kind == 2:
                archive.writestr(rng.choice((chosen, chosen.removesuffix(".npy"), "\x1b[2J", "x" * 9000)), b"x")
        if kind == 3:
            path.write_bytes(damaged_bytes(path.read_bytes(), rng))
        return lambda: read_weights(path, SMALL)

    judge(numbers, read, path)


@seeds(30, 600)
def test_damaged_safetensors_give_weights_or_a_sentence(numbers: range, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    safetensors.numpy.save_file(arrays(), path)
    whole = path.read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")

    def read(rng: random.Random) -> Callable[[], object]:
        if rng.random() < 0.5:
            path.write_bytes(damaged_bytes(whole, rng))
        else:
            header = damaged_json(json.loads(whole[8:length]), rng).encode()
            path.write_bytes(len(header).to_bytes(8, "little") + header + whole[length:])
        return lambda: read_weights(path, SMALL)

    judge(numbers, read, path)


def plans() -> list[tuple[RunPlan, Network, Machine, Any]]:
    """Make plans with patches, columns, parts and a GPU, for primitives with made-up costs and for the real ones."""
    real = (*TABLE, *IN_HOST_RAM)
    on_gpu = planned_on_gpu(MIXED, (20, 11, 8), 2**33, 2**33, rates=None)
    return [
        (patches(), MIXED, MACHINE, FAKES),
        (walking(), MIXED, MACHINE, FAKES),
        (in_parts(), WIDE, MACHINE, FAKES),
        (planned(WIDE, (40, 40, 40), 2**33, table=TABLE), WIDE, MACHINE, real),
        (on_gpu, MIXED, WITH_GPU, real),
    ]


@seeds(80, 2000)
def test_damaged_plans_give_a_plan_or_a_sentence(numbers: range) -> None:
    """A plan that reads and runs here is one whose predictions can be printed."""
    whole = plans()

    def read(rng: random.Random) -> Callable[[], object]:
        plan, network, machine, table = rng.choice(whole)
        text = damaged_json(json.loads(plan.to_json()), rng)

        def use() -> None:
            made = RunPlan.from_json(text)
            check_runs(made, network, machine, ram_bytes=2**40, table=table)
            there = made.main.for_output(plan.output, network)
            explain(made.with_main(there), machine)
            assert there.seconds > 0

        return use

    judge(numbers, read)


def timed_layers(device: DeviceKind, machine: Machine) -> tuple[Measurement, ...]:
    """Make one timed layer for every primitive of a device, in the last variant of the primitive."""
    found = {}
    for shape in samples(device, "fp32"):
        for p in TABLE:
            if p.name.startswith(device) and p.kind == shape.kind and p.why_not(shape, machine) is None:
                found[p.name] = Measurement(p.name, p.version, p.variants(shape, machine)[-1], shape, 0.01)
    return tuple(found.values())


@seeds(40, 800)
def test_damaged_cost_files_give_costs_or_a_sentence(numbers: range) -> None:
    """Damage cost files, some of which hold a layer of every primitive."""
    on_gpu = costs(device="gpu", machine=WITH_GPU, layers=timed_layers("gpu", WITH_GPU))
    whole = [(costs(), COSTS_TABLE), (costs(layers=timed_layers("cpu", MACHINE)), TABLE), (on_gpu, TABLE)]

    def read(rng: random.Random) -> Callable[[], object]:
        one, table = rng.choice(whole)
        text = damaged_json(json.loads(one.to_json()), rng)

        def use() -> None:
            read_costs = Costs.from_json(text)
            read_costs.why_not(MACHINE, 2, table)
            read_costs.rates(table)

        return use

    judge(numbers, read)


@seeds(30, 600)
def test_damaged_traces_give_a_timeline_or_a_sentence(numbers: range, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with Trace(path) as trace:
        for index, track in enumerate(("reader", "GPU 0", "writer waiting", "reader")):
            trace.record(track, f"step {index}", index, index + 0.5, layer=index)
    lines = path.read_bytes().splitlines()

    def read(rng: random.Random) -> Callable[[], object]:
        damaged, at = list(lines), rng.randrange(1, len(lines) - 1)
        if rng.random() < 0.7:
            damaged[at] = damaged_json(json.loads(lines[at].rstrip(b",")), rng).encode() + b","
            path.write_bytes(b"\n".join(damaged) + b"\n")
        else:
            path.write_bytes(damaged_bytes(b"\n".join(lines) + b"\n", rng))
        return lambda: (list(read_spans(path)), read_timeline(path).lines())

    judge(numbers, read, path)


WISDOM = """
import json, random, sys
from pathlib import Path
import numpy as np
from tests.support.damage import damaged_bytes, damaged_json
from znnpy.files import cache_folder
from znnpy.kernels.cpu import fft
from znnpy.machine import this_machine
from znnpy.measure import fftw_wisdom as kept

fft.TRANSFORM_SECONDS = kept.LEARNING_SECONDS = 60.0
machine = this_machine()

def transforms():
    for size in (96, 100):
        lines = fft.like((size, 24), (24 * 8, 8), np.complex64)
        fft.Transform(lines, lines, (0,))

with kept.wisdom_kept(machine, 1e6) as wisdom:
    transforms()
(path,) = cache_folder().iterdir()
whole = path.read_bytes()
assert json.loads(whole)["transforms"], "nothing was learned"
for seed in range(*json.loads(sys.argv[1])):
    rng = random.Random(seed)
    text = damaged_bytes(whole, rng) if seed % 2 else damaged_json(json.loads(whole), rng).encode()
    if text == whole:
        continue
    path.write_bytes(text)
    with kept.wisdom_kept(machine, 1.0) as wisdom:
        transforms()
    for sentence in wisdom.sentences:
        assert len(sentence) < 600 and sentence.isprintable(), sentence
print("read all")
"""


@seeds(20, 300)
def test_damaged_wisdom_of_the_cache_is_refused(
    numbers: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child lives to its end: what FFTW would abort on is refused by its digest."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert child(WISDOM, numbers) == "read all"


JOURNAL = """
import json, random, re, sys
from pathlib import Path
import numpy as np
from tests.support.cli import Place
from znnpy.errors import ResumeError
from znnpy.inference import infer
from znnpy.kernels.cpu import fft
from znnpy.network import Conv, Network
from znnpy.measure import fftw_wisdom as kept

fft.TRANSFORM_SECONDS = kept.LEARNING_SECONDS = 60.0
kept.SHORT_SECONDS, kept.LEARNING_PART = 0.0, 1e9
place = Place.furnish(Path(sys.argv[2]), Network("wide", 1, (Conv((3, 3, 3), 1, "relu"),), None))
place.write_volume(np.random.default_rng(2).integers(0, 256, (10, 100, 300), np.uint8))
arguments = dict(out=place.out, patch=(8, 98, 98), threads=1, only="cpu.conv.fft_data")

def stop(event):
    if 0 < event.columns_done < event.columns:
        raise KeyboardInterrupt

try:
    infer(place.volume, place.folder / "net.yaml", progress=stop, **arguments)
except KeyboardInterrupt:
    pass
journal = place.out.with_name(place.out.name + ".journal")
whole = journal.read_bytes()
places = [found.start() + 2 for found in re.finditer(rb"#x[0-9a-f]", whole)]
assert places, "no wisdom is in the journal"
for seed in range(*json.loads(sys.argv[1])):
    rng = random.Random(seed)
    text = bytearray(whole)
    for at in rng.sample(places, rng.choice((1, 1, 3))):
        text[at] = rng.choice(b"0123456789abcdef".replace(text[at : at + 1], b""))
    journal.write_bytes(text)
    try:
        infer(place.volume, place.folder / "net.yaml", resume=True, **arguments)
    except ResumeError as error:
        assert len(str(error)) < 800 and str(error).isprintable()
    else:
        raise AssertionError(f"seed {seed} was believed")
journal.write_bytes(whole)
infer(place.volume, place.folder / "net.yaml", resume=True, **arguments)
print("read all")
"""


@seeds(4, 60)
def test_damaged_wisdom_of_a_journal_is_refused(numbers: range, tmp_path: Path) -> None:
    """A run goes on with the wisdom that it began with, and with no other."""
    assert child(JOURNAL, numbers, str(tmp_path)) == "read all"


def child(program: str, numbers: range, *more: str) -> str:
    """Run `program` in a process of its own, with these numbers and words; return its output."""
    command = [sys.executable, "-c", program, json.dumps([numbers.start, numbers.stop]), *more]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_shipped_networks_without_a_line_give_a_network_or_a_sentence(tmp_path: Path) -> None:
    """Leave out each line of the file once."""
    path = tmp_path / "net.yaml"
    for shipped in SHIPPED.glob("*.yaml"):
        lines = shipped.read_text().splitlines(keepends=True)
        for index in range(len(lines)):
            path.write_text("".join(lines[:index] + lines[index + 1 :]))
            ended(lambda: read_network(path), str(path))


def test_damaging_values_exceed_the_limits_of_files() -> None:
    assert max(value for value in VALUES if isinstance(value, int)) == 10**400
