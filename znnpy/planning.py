"""The plan of a job as one function: network, volume and limits in, the fastest plan and what there is to say out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from znnpy.errors import NoPlanError, ShapeError
from znnpy.formats.networks import DEFAULT, read_network
from znnpy.kernels.table import TABLE
from znnpy.machine import Limits, this_machine
from znnpy.network import Network
from znnpy.planner.beside import Makes
from znnpy.planner.cost_model import Rates, assumed_rates
from znnpy.planner.explain import predicted
from znnpy.planner.kinds import kind_of
from znnpy.planner.memory import baseline_bytes
from znnpy.planner.plan import Plan
from znnpy.planner.search import make_plan, options_for
from znnpy.planner.throughput import Point, points
from znnpy.planner.why import Considered, considered
from znnpy.run.choice import check_words, columns_only
from znnpy.run.devices import Site, check_device_words, elsewhere, for_elsewhere, gpus_of, site_for
from znnpy.run.learning import Known, Making
from znnpy.run.modes import (
    HOSTED,
    Task,
    check_hosted,
    device_meant,
    names_of_gpu,
    names_on,
    processor_plans,
    rates_of,
    scheme_of,
)
from znnpy.run.rigor import Study, rigor_of
from znnpy.run.shelf import Shelf
from znnpy.run.timing import Progress
from znnpy.run_log import log_once, log_phase
from znnpy.self_check import check_plan
from znnpy.shapes import FLOAT32, Vec3
from znnpy.volume.base import Absent
from znnpy.volume.registry import open_volume
from znnpy.volume.source import Source, parse_roi

CURVES_SECONDS = 12.0  # for all curves together: more points would take longer than one waits for a picture
DEFAULT_SHAPE: Vec3 = (1024, 1024, 1024)  # what `plan` assumes when it is told no volume


def plan(
    network: str | Path = DEFAULT,
    *,
    volume: str | Path | None = None,
    dataset: str | None = None,
    fill_missing: float | None = None,
    shape: Vec3 | None = None,
    roi: str | None = None,
    border: str = "valid",
    output_dtype: str = "float32",
    ram: int | str | None = None,
    threads: int | None = None,
    patch: Vec3 | None = None,
    only: str | Sequence[str] = (),
    cover: str | None = None,
    depth_first: bool = True,
    device: str = "auto",
    vram: int | str | None = None,
    precision: str | None = None,
    gpus: int | str | None = None,
    mode: str = "auto",
    costs: str | Path | None = None,
    machine: str | Path | None = None,
    rigor: str = "estimate",
    time_limit: float | None = None,
    paranoid: bool = False,
    tell: Callable[[str], None] = log_once,
    tell_why: Callable[[list[Considered]], None] | None = None,
    tell_point: Callable[[Point], None] | None = None,
    tell_progress: Callable[[Progress], None] = lambda progress: None,
) -> Plan:
    """The fastest plan for a network, a volume and limits of memory; it needs no weights.

    network       network file (.yaml, .znni), or the name of a network that ships.
    volume        path of a volume to plan for; or give `shape`. Without both, 1024^3 voxels are assumed.
    dataset       name of the array inside the file of the volume; None: the only 3D or 4D one.
    fill_missing  value of voxels of the volume whose file is missing; None: VolumeError.
    shape         voxels (z, y, x) of the volume.
    roi           "z0:z1,y0:y1,x0:x1", the part of the volume to predict from, in voxels; None: all of it.
    border        "valid": the output is field of view - 1 voxels smaller; "reflect": as large as the volume.
    output_dtype  "float32", "float16" or "uint8", of the output.
    ram           limit for the whole process, in bytes or as "16G"; None: 3/4 of the machine's memory.
    threads       threads that compute; None: as many as the cores that the process may use.
    patch         output voxels (z, y, x) of one patch, or of one step of a column; None: the fastest.
    only          name of a primitive, or several, for the layers that they fit; empty: any.
    cover         "columns": each step keeps what the next needs; "patches": each is computed for itself; None: either.
    depth_first   True: layers behind a pooling may take its fragments in parts, which needs less memory.
    device        "cpu", "gpu", or "auto": a GPU where one works, else the CPU.
    vram          limit for the memory of each GPU, in bytes or as "12G"; None: 90 % of what is free.
    precision     on a GPU "fp32", "tf32" or "fp16"; None: fp32. The CPU always computes in fp32.
    gpus          number of equal GPUs that compute together, or "all"; None: 1.
    mode          "cpu", "gpu", "gpu-host", "cpu-to-gpu" or "side-by-side", as `znnpy plan --help` explains; "auto".
    costs         file of speeds that `znnpy measure --out` wrote here; None: those that are stored of this machine.
    machine       file that `znnpy measure --export` wrote on another machine, which the plan is for; None: this one.
    rigor         "estimate"; "measure": time the layers of the best plans here first; "exhaustive": all layers that
                  may be in the best plan.
    time_limit    seconds after which no further layer is timed; None: 60 for "measure", no limit for "exhaustive".
    paranoid      run each chosen primitive on its layer, and raise VerifyError where it differs from the definition.
    tell          called with each sentence on what is not as asked for, such as that there is no GPU.
    tell_why      called once with every primitive for every layer, its time in seconds, and why it was not taken.
    tell_point    called with the best plan at each of several limits of memory, within CURVES_SECONDS in all.
    tell_progress called before each layer that is timed or checked.

    NoPlanError names the smallest need when nothing fits, DeviceError says why there is no GPU for device "gpu", and
    ValueError names a value that an argument cannot have.
    """
    check_words(border, output_dtype, cover)
    names = (only,) if isinstance(only, str) else tuple(only)
    meant = check_device_words(device_meant(mode, device), vram, precision, names_of_gpu(names, mode))
    if machine is not None and mode not in ("auto", "cpu", "gpu"):
        raise ValueError("a file of a machine holds the costs of one device: leave out machine, or mode")
    study = Study(*rigor_of(rigor, time_limit), tell_progress)
    runs = rigor != "estimate" or paranoid
    shelf = _shelf(costs, machine, runs=runs)
    job = _job(network, volume, dataset, Absent(fill_missing), shape, roi, border, np.dtype(output_dtype).itemsize)
    count = gpus_of(gpus, meant)
    check_hosted(mode, count)
    wanted = _Wanted(job, ram, shelf.threads(threads), vram, patch, names, cover, depth_first, study, mode)
    tells = _Tells(tell, tell_why, tell_point)
    if machine is not None:
        there = elsewhere(shelf, shelf.meant(meant), precision, count)
        wanted = replace(wanted, mode="gpu" if there.device == "gpu" else "cpu")
        made = for_elsewhere(wanted.plan(there, kinds=True, baselines=tells.why is not None), shelf)
        tells.of(wanted, made, [there], shelf)
        return made
    return _here(wanted, shelf.meant(meant), precision, shelf, tells, gpus=count, paranoid=paranoid)


def _shelf(costs: str | Path | None, machine: str | Path | None, *, runs: bool) -> Shelf:
    """Of these files; ValueError for words that contradict each other. `runs`: layers do before there is a plan."""
    if costs is not None and machine is not None:
        raise ValueError("a file of a machine holds its costs: give costs or machine")
    if machine is not None and runs:
        raise ValueError("layers run on the machine that is here: leave out rigor and paranoid, or machine")
    return Shelf(costs, machine=machine)


def _here(
    wanted: _Wanted,
    meant: str,
    precision: str | None,
    shelf: Shelf,
    tells: _Tells,
    *,
    gpus: int | None,
    paranoid: bool,
) -> Plan:
    """The plan for a device of this machine; beside one for a GPU that nobody asked for, the best for the processor."""
    network, vram = wanted.job.network, wanted.vram
    make = partial(wanted.plan, kinds=True, baselines=tells.why is not None)
    with site_for(make, meant, vram, precision, shelf, gpus=gpus) as (site, made):
        sites = [site]
        if made.device == "gpu" and meant == "auto" and vram is None:
            sites.append(Site(this_machine(), costs=shelf))
            with suppress(NoPlanError):
                estimated = replace(wanted, study=Study()).plan(sites[1])
                made = replace(made, alternatives=(*made.alternatives, kind_of(network, made, estimated)))
        log_phase("planned", predicted(made))
        if paranoid:
            check_plan(made, network, site, wanted.study.tell)
        tells.of(wanted, made, sites, shelf)
        return made


@dataclass(frozen=True, slots=True)
class _Job:
    """What is to be computed."""

    network: Network
    output: Vec3
    itemsize_in: int
    itemsize_out: int
    extra_bytes: int  # that unpack the volume's chunks


def _job(
    name: str | Path,
    volume: str | Path | None,
    dataset: str | None,
    absent: Absent,
    shape: Vec3 | None,
    roi: str | None,
    border: str,
    itemsize_out: int,
) -> _Job:
    """From a volume, or a shape; ValueError where both are given."""
    if shape is not None and len(shape) != 3:
        raise ShapeError(f"a shape has three sizes (z, y, x), not {shape}")
    if volume is not None and shape is not None:
        raise ValueError("a volume and a shape both give a size: give one of them")
    network = read_network(name).network
    if volume is not None:
        with open_volume(Path(volume), dataset, absent) as opened:
            region = parse_roi(roi, opened.size) if roi else None
            output = Source(opened, roi=region, border=border, network=network, allow_nan=False).output
            return _Job(network, output, opened.dtype.itemsize, itemsize_out, opened.extra_bytes)
    size = parse_roi(roi, shape or DEFAULT_SHAPE).size if roi else shape or DEFAULT_SHAPE
    return _Job(network, size if border == "reflect" else network.dense_size(size), 1, itemsize_out, 0)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A job, and the caller's words on how it is to run."""

    job: _Job
    ram: int | str | None
    threads: int | None
    vram: int | str | None
    patch: Vec3 | None
    only: tuple[str, ...]
    cover: str | None
    depth_first: bool
    study: Study
    mode: str

    def limits(self, site: Site) -> Limits:
        return site.limits(self.ram, self.threads, self.vram, beyond=True)

    def plan(self, site: Site, *, kinds: bool = False, baselines: bool = False) -> Plan:
        """The fastest on a site; with `kinds` the best of every other kind there too, with `baselines` of schemes."""
        limits = self.limits(site)
        known = rates_of(site, self.job.network, limits, self.mode)
        known = self.study.rates(site, limits, known, *self._makes(site, limits))
        task = self._task(site, limits, known, kinds=kinds, baselines=baselines)
        made, lost = task.best(show=kinds)
        others = [kind_of(task.network, made, other, scheme_of(other)) for other in lost if kinds]
        return replace(made, alternatives=(*made.alternatives, *others), rigor=self.study.done)

    def _makes(self, site: Site, limits: Limits) -> list[Making]:
        """Who makes the best plan with what is known; before, where that takes many plans, one of a single device."""

        def best(known: Known) -> Plan:
            return self._task(site, limits, known).best()[0]

        def alone(known: Known) -> Plan:
            return self._task(site, limits, known).make(self.job.output, limits)

        one = self.mode in ("cpu", "gpu", *HOSTED) or site.device == "cpu"
        return [best] if one and site.devices == 1 else [alone, best]

    def _task(self, site: Site, limits: Limits, known: Known, **more: Any) -> Task:
        """With what is known of devices; `more` are words of `make_plan`."""
        words: dict[str, Any] = {"columns": columns_only(self.cover), "rates": known.get(site.device), **more}

        def make(output: Vec3, limits: Limits, **own: Any) -> Plan:
            return self.within(site, limits, output=output, **{**words, **own})

        return Task(
            self.mode,
            site,
            self.job.network,
            self.job.output,
            limits,
            self.held(site),
            self.only,
            masks=False,
            make=make,
            processor=self.beside(site, known.get("cpu")),
            host_rates=known.get("cpu"),
        )

    def beside(self, site: Site, rates: Rates | None) -> Makes:
        """Plans for the processor of a site with GPUs."""
        job = self.job
        return processor_plans(
            site,
            job.network,
            self.only,
            rates,
            itemsize_in=job.itemsize_in,
            itemsize_out=job.itemsize_out,
            columns=columns_only(self.cover),
            depth_first=self.depth_first,
        )

    def held(self, site: Site) -> int:
        """Bytes of the process beside a run, its weights counted."""
        return baseline_bytes() + site.later_bytes + self.job.extra_bytes + FLOAT32 * self.job.network.parameters

    def rates(self, site: Site, limits: Limits) -> Rates:
        """As the plan was made with; of a site that it is not for, as they are stored or assumed."""
        if (found := self.study.found.get(site.device)) is not None:
            return found
        known = site.rates(self.job.network, limits)
        return known or assumed_rates(site.machine, limits.threads, site.device)

    def within(self, site: Site, limits: Limits, output: Vec3 | None = None, **more: Any) -> Plan:
        """The fastest of one device within other limits, of another output; `more` are words of `make_plan`."""
        job = self.job
        words: dict[str, Any] = {
            "itemsize_in": job.itemsize_in,
            "itemsize_out": job.itemsize_out,
            "patch": self.patch,
            "only": names_on(site.device, self.only, self.mode),
            "depth_first": self.depth_first,
            "baseline": self.held(site),
        }
        return make_plan(job.network, output or job.output, site.machine, limits, **{**words, **site.words(), **more})


@dataclass(frozen=True, slots=True)
class _Tells:
    """Whom to tell what there is to say beside the plan."""

    sentence: Callable[[str], None]
    why: Callable[[list[Considered]], None] | None
    point: Callable[[Point], None] | None

    def of(self, wanted: _Wanted, made: Plan, sites: Sequence[Site], shelf: Shelf) -> None:
        """sites  where the layers run, and where else they might have run"""
        site, network = sites[0], wanted.job.network
        sentences = (*site.sentences, *site.beyond(made.limits), *shelf.sentences, *wanted.study.sentences)
        for sentence in sentences:
            self.sentence(sentence)
        if self.why is not None and made.offloaded:
            self.sentence(f"why primitives are not taken is told of layers on one device, not of mode {made.mode}")
        elif self.why is not None:
            rates = wanted.rates(site, made.limits)
            self.why(considered(made, network, site.machine, rates, TABLE, wanted.only))
        if self.point is not None:
            for point in _curves(wanted, made, sites):
                self.point(point)


def _curves(wanted: _Wanted, made: Plan, sites: Sequence[Site]) -> Iterator[Point]:
    """Columns and patches on each site, with all else as asked for, up to the machine's memory or the limit beyond."""
    covers = [True, False] if wanted.cover is None else [columns_only(wanted.cover)]
    curves = [(site, wanted.limits(site), columns) for site in sites for columns in covers]
    until = time.monotonic() + CURVES_SECONDS
    for index, (site, limits, columns) in enumerate(curves):
        gpu = site.machine.gpu
        rates = wanted.rates(site, limits)
        options = options_for(site.machine, limits, only=wanted.only, rates=rates, device=site.device)
        words: dict[str, Any] = {"columns": columns, "options": options}
        if site.device == made.device:
            words["baseline"] = made.memory.baseline
        most = max(site.machine.ram_bytes, limits.ram_bytes)
        if gpu is not None:
            most = max(gpu.memory_bytes, limits.vram_bytes or 0)

        def make(nbytes: int, at: Site = site, limits: Limits = limits, words: dict[str, Any] = words) -> Plan:
            on_cpu = at.device == "cpu"
            there = replace(limits, ram_bytes=nbytes) if on_cpu else replace(limits, vram_bytes=nbytes)
            return wanted.within(at, there, **words)

        left = until - time.monotonic()
        for point in points(make, most, seconds=left / (len(curves) - index)):
            yield replace(point, done=(index + point.done) / len(curves))
