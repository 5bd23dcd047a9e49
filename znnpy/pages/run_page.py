"""The page of a run, made of its record; of less, made of what a prediction says of itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from znnpy.errors import PlanFileError, VolumeError, ZnnpyError
from znnpy.given_options import Value, command_line, python_call
from znnpy.messages import excerpt, one_line, option
from znnpy.network_result import INTEGER_DTYPE, MAPS
from znnpy.pages.page import Picture, figure_picture, filled, png_picture, threads_text
from znnpy.planner.run_plan import RunPlan
from znnpy.plots.run_figures import devices_figure, layers_figure, limit_note, memory_figure, progress_figure
from znnpy.report.plan_text import explain
from znnpy.run_record import RunRecord, is_record
from znnpy.shapes import text
from znnpy.shared_options import NO_AXES, USUAL_DTYPE
from znnpy.units import human_bytes, human_seconds
from znnpy.view.scene import Scene, opened_scene
from znnpy.view.slices import left_out, png, slices
from znnpy.volume.location import volume_location
from znnpy.volume.provenance import Provenance, array_names
from znnpy.volume.written import attributes_of
from znnpy.windows.settings import Windows

Pairs = list[tuple[str, str]]

VOLUME, MASK = "VOLUME", "MASK"  # names in commands, for what is not named
VERIFIED_WITH = ("network", "weights", "mask", "fill_missing")  # options of a run that `verify` needs too
SHOWN_AXES = (0, 1)  # of slices: across z, and across y


@dataclass(frozen=True, slots=True)
class Shown:
    """The slices of a page, and sentences on what is not shown."""

    rows: list[list[Picture]]
    notes: list[str]


def run_page(run: str, volume: str | None = None) -> str:
    """Return the page of a run.

    run     path of a record, or the name of a prediction
    volume  that was predicted; None: where the record says

    Errors are ZnnpyErrors that say why a file cannot be read.
    """
    location = volume_location(run)
    if location.is_local and is_record(location.path):
        return _page_of_record(RunRecord.load(location.path), volume)
    return _page_of_prediction(run, volume)


def _page_of_record(record: RunRecord, volume: str | None) -> str:
    report, given = record.report, dict(record.arguments)
    shown = _shown(record.output, volume or record.volume)
    measured = bool(report.computed and record.layers)
    stages = [(f"{name}", human_seconds(spent)) for name, spent in report.stage_seconds.items()]
    content: dict[str, Any] = {}
    if measured:
        content = {
            "stages": [
                (
                    "the whole run",
                    f"{human_seconds(report.seconds)}, planned {human_seconds(report.predicted_seconds)}",
                ),
                *stages,
            ],
            "layers": [
                {
                    "name": layer.name,
                    "primitive": layer.primitive,
                    "device": layer.device,
                    "predicted": human_seconds(layer.predicted),
                    "measured": human_seconds(layer.measured),
                }
                for layer in record.layers
            ],
            "layers_picture": figure_picture(
                layers_figure(record.layers), "seconds of each layer, planned and measured"
            ),
            "devices_picture": figure_picture(devices_figure(record.over_time), "devices and threads over time"),
            "memory_picture": figure_picture(memory_figure(record.over_time, report), "memory over time"),
            "memory_note": limit_note(report),
            "progress_picture": figure_picture(progress_figure(record.over_time, report), "progress over time"),
        }
    return filled(
        "run.html",
        title=f"{record.network} over {Path(record.volume).name or record.volume}",
        under=f"{record.output}: {text(report.shape)} voxels, begun {record.began} on {record.machine.host}",
        figures=_figures(record),
        warnings=report.warnings,
        slices=shown.rows,
        slice_notes=shown.notes,
        measured=measured,
        off_by=report.off_by,
        machine=_machine(record),
        commands=_commands(record, given),
        reproduce_notes=(),
        identities=[
            ("network, SHA-256", record.network_sha256),
            ("weights, SHA-256", record.weights_sha256),
            ("znnpy", record.znnpy_version),
        ],
        lines="\n".join(record.lines),
        plan="\n".join(record.plan),
        **content,
    )


def _figures(record: RunRecord) -> list[tuple[str, str, str]]:
    """Return the figures that one sees first: name, value, and what to hold it against."""
    report = record.report
    speed = report.computed / report.seconds if report.seconds else 0.0
    planned = report.voxels / report.predicted_seconds if report.predicted_seconds else 0.0
    part = "of this run" if report.computed < report.voxels else "in all"
    found = [
        ("voxels", f"{report.computed:,}", part),
        ("time", human_seconds(report.seconds), f"plan: {human_seconds(report.predicted_seconds)}"),
        ("speed", f"{speed:,.0f}/s", f"plan: {planned * report.computed / max(1, report.voxels):,.0f}/s"),
        ("memory", human_bytes(report.peak_bytes), f"plan: {human_bytes(report.promised_bytes)}"),
        ("device", excerpt(report.device, 40), f"{report.mode}, {report.precision}, {threads_text(report.threads)}"),
    ]
    if report.vram_bytes is not None:
        promised = human_bytes(report.promised_vram_bytes)
        found.insert(4, ("memory of the GPU", human_bytes(report.vram_bytes), f"plan: {promised}"))
    return found


def _machine(record: RunRecord) -> Pairs:
    machine = record.machine
    return [
        ("host", machine.host),
        ("system", machine.system),
        ("processor", f"{machine.processor}, {machine.cores} cores for this process"),
        ("memory", human_bytes(machine.ram_bytes)),
        ("GPU", machine.gpu or "none was used"),
        ("BLAS", machine.blas),
        ("Python", machine.python),
        ("versions", ", ".join(f"{name} {version}" for name, version in machine.versions.items())),
    ]


def _commands(record: RunRecord, given: dict[str, Any]) -> str:
    """Return what computes the prediction again, and what checks it."""
    checked = {name: given[name] for name in VERIFIED_WITH if name in given}
    checked |= _precision(record.report.precision)
    if record.in_python:
        return f"{python_call('infer', given)}\n"
    volume = str(given.pop("volume"))
    infer = command_line("infer", [volume], given)
    return f"{infer}\n{command_line('verify', [record.output, volume], checked)}\n"


def _precision(name: str) -> dict[str, Value]:
    """Return the option of a precision; nothing for that without which every command works."""
    return {} if name == "fp32" else {"precision": name}


# --- a prediction without a record ---


def _page_of_prediction(prediction: str, volume: str | None) -> str:
    place = replace(volume_location(prediction), dataset=None)
    said = attributes_of(place)
    if "job" not in said:
        raise VolumeError(
            f"{prediction} is neither a record nor a prediction of znnpy; give what `znnpy infer` wrote, or what "
            "`znnpy infer VOLUME --record run.json` recorded"
        )
    claim = Provenance.of(place, array_names(place))
    try:
        plan = RunPlan.from_json(str(said.get("plan")))
        explained = explain(plan)
    except PlanFileError as error:
        raise error.with_context(f"the plan in {prediction}") from None
    job = claim.job
    shown = _shown(prediction, volume)
    return filled(
        "run.html",
        title=f"{excerpt(claim.network)} over {text(job.volume.shape[1:])} voxels",
        under=f"{prediction}: {text(plan.output)} voxels",
        figures=[
            ("output", text(plan.output), f"from {text(job.volume.shape[1:])}"),
            ("planned time", human_seconds(plan.seconds), f"{plan.voxels_per_second:,.0f} voxels/s"),
            ("planned memory", human_bytes(plan.memory.peak), f"limit: {human_bytes(plan.limits.ram_bytes)}"),
            ("device", plan.device.upper(), f"{plan.mode}, {claim.precision}"),
        ],
        warnings=[
            f"there is no record of this run, so nothing measured is shown; {option('record')} keeps one of the next"
        ],
        slices=shown.rows,
        slice_notes=shown.notes,
        measured=False,
        commands=_stated_commands(prediction, volume or VOLUME, claim, plan),
        reproduce_notes=[
            "A prediction holds no names of files: put in that of the network, of its weights where the network's file "
            f"does not name them{', that of the volume' if volume is None else ''}"
            f"{'' if job.mask is None else ', that of the mask'}, and that of the new output.",
            "It does not hold either how much of the machine the run might use, nor which methods were left out.",
        ],
        identities=[
            ("network, SHA-256", job.network),
            ("weights, SHA-256", job.weights),
            ("sampled voxels of the volume, SHA-256", job.volume.samples_sha256),
            ("znnpy", one_line(str(said.get("znnpy_version", "unknown")))),
        ],
        lines="",
        plan=explained,
    )


def _stated_commands(prediction: str, volume: str, claim: Provenance, plan: RunPlan) -> str:
    """Return what does the job again that a prediction states, and what checks it."""
    job = claim.job
    out = f"OUTPUT{Path(volume_location(prediction).name).suffix}"
    precision = _precision(claim.precision)
    needed: dict[str, Value] = {"fill_missing": job.fill_missing, "mask": None if job.mask is None else MASK}
    usual = INTEGER_DTYPE if job.result.is_integer else USUAL_DTYPE
    stated: dict[str, Value | tuple[Value, ...]] = {
        "network": claim.network,
        "dataset": job.volume.dataset or None,
        "scale": job.volume.scale,
        "time": job.volume.time,
        "roi": job.roi or None,
        "border": None if job.border == "valid" else job.border,
        "output_dtype": None if job.output_dtype == usual else job.output_dtype,
        **precision,
        "device": plan.device if precision else None,  # not every device has each precision
        "meaning": job.meaning,
        **({} if job.windows is None else _windows(job.windows)),
        "output": None if job.result.kind == MAPS.kind else job.result.kind,
        "threshold": job.result.above or None,
        "ensemble": "probabilities" if job.result.apart else None,
        "allow_nan": job.allow_nan or None,
        **needed,
        "multiscale": job.multiscale or None,
        "sharded": job.sharded or None,
        "out": out if job.format is None else f"{job.format}://{out}",
    }
    infer = command_line("infer", [volume], _given(stated))
    checked = _given({"network": claim.network, **needed, **precision})
    return f"{infer}\n{command_line('verify', [prediction, volume], checked)}\n"


def _windows(windows: Windows) -> dict[str, Value | tuple[Value, ...]]:
    """Return the options that give windows, all of them, since the file of the network may state others."""
    return {
        "window": windows.size,
        "overlap": windows.overlap,
        "blend": windows.blend,
        "sigma": windows.sigma if windows.blend == "gaussian" else None,
        "mirror": ",".join("zyx"[axis] for axis in windows.mirror) or NO_AXES,
        "windows_like": windows.rule,
    }


def _given(options: dict[str, Value | tuple[Value, ...]]) -> dict[str, Value | tuple[Value, ...]]:
    """Return the options that have a value."""
    return {name: value for name, value in options.items() if value is not None}


# --- slices ---


def _shown(prediction: str, volume: str | None) -> Shown:
    """Draw slices of the volume and the prediction, as far as they are where they are said to be."""
    notes: list[str] = []
    for below in dict.fromkeys((volume, None)):
        try:
            with opened_scene(prediction, below) as scene:
                return Shown(_pictures(scene), [*notes, *left_out(scene)])
        except ZnnpyError as error:
            notes.append(f"not shown: {error}")
    return Shown([], notes)


def _pictures(scene: Scene) -> list[list[Picture]]:
    return [[png_picture(png(one.picture), one.title) for one in row] for row in slices(scene, SHOWN_AXES)]
