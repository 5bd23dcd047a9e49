"""The job of nnU-Net's predictor: images of a case on disk in, its labels on disk out.

The prepared case is an array in memory, over which windows run as over any volume. They write to a file beside the
labels, which holds labels where nothing is left to do to them but to place them, and the logits of all classes else.
It has a journal, by which an interrupted run goes on; the case is prepared again, to the same values.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from znnpy.errors import NoPlanError, OutputError, PlanFileError, ResumeError, ShapeError
from znnpy.files import regular_file, remove, sync_folder, write_asked
from znnpy.formats.weights import sha256
from znnpy.machine import give_back_memory, limits_of, peak_bytes, process_bytes, this_machine
from znnpy.messages import option
from znnpy.network_files import read_asked
from znnpy.network_result import MOST_LABELS
from znnpy.nnunet.export import Labels, labels_of, placed
from znnpy.nnunet.folder import NnunetModel, read_model
from znnpy.nnunet.images import files_of, read_images, stated_size
from znnpy.nnunet.label_file import LabelHeader, record_of
from znnpy.nnunet.names import ModelName, case_path, label_path, unfinished
from znnpy.nnunet.preprocessing import NnunetCase, prepared, preparing_bytes
from znnpy.options import InferOptions
from znnpy.planner.run_plan import RunPlan
from znnpy.report.run_report import Report
from znnpy.run_log import log_phase
from znnpy.shapes import text
from znnpy.trained import TrainedNetwork
from znnpy.units import human_bytes, human_seconds, mebibytes
from znnpy.volume.hdf5_store import DATASET
from znnpy.volume.output_names import Names
from znnpy.volume.output_target import mode_of

_log = logging.getLogger(__name__)

PART_OF_A_CASE = ("roi", "mask", "border", "dataset", "scale", "time", "fill_missing", "missing_chunks", "allow_nan")
OF_CLUSTERS = ("cluster", "client", "part", "finish", "items")
OF_THE_MODEL = ("weights", "meaning", "window", "windows_like", "threshold", "ensemble")
OF_THE_LABELS = ("output_dtype", "sharded", "multiscale")
LIBRARIES_BYTES = 2**26  # of libraries that are loaded to prepare a case


def infer_case(asked: InferOptions, name: ModelName, infer: Callable[[InferOptions], Report]) -> Report:
    """Predict the labels of a case with a trained model, and write them as nnU-Net does.

    infer  runs windows over an array

    Errors are those of `znnpy.infer`.
    """
    began, earlier = time.perf_counter(), peak_bytes()
    _check_options(asked)
    how = mode_of(overwrite=asked.overwrite, resume=asked.resume)
    first, out = case_path(asked.volume), label_path(asked.volume, asked.out, name)
    model_files = [name.folder / file for file in ("plans.json", "dataset.json")]
    target = regular_file(out, how != "new", inputs={"volume": first, "network": model_files})
    between = unfinished(target)
    if how == "new" and between.exists():
        raise OutputError(
            f"an unfinished run left {between}; continue with {option('resume', True)}, or start again with "
            f"{option('overwrite', True)}"
        )
    model = read_model(name.folder, name.folds, name.checkpoint)
    for note in model.notes:
        _log.warning("%s", note)
    trained = TrainedNetwork(model.network, model.weights)
    asked = replace(asked, network=trained, out=str(between), meaning="windows", output="maps")
    files = files_of(first, model.dataset.channels)
    needed = [preparing_bytes(model.plans, *stated_size(file, model.plans)) for file in files]
    regular_file(out, overwrite=True, inputs={"volume": files})
    record = _record(model, asked, files)
    replaces = target.exists()  # labels of before, which the run that goes on was to replace
    if replaces and how == "resume" and not (between.exists() or Names(between).partial.exists()):
        return replace(_finished(target, record), warnings=model.notes, seconds=time.perf_counter() - began)
    _check_memory(max(needed), asked.ram)
    images = read_images(files, model.plans)
    case = prepared(model.plans, images.images, images.spacing)
    images = replace(images, images=())
    log_phase("opened", f"{first}: {_described(case)}")
    header, frame = LabelHeader.like(files[0]), replace(case, data=np.empty((0, 0, 0, 0), np.float32))
    streams = not case.is_resampled and model.dataset.order is None and 2 <= model.dataset.heads <= MOST_LABELS
    spent, held = human_seconds(time.perf_counter() - began), human_bytes(peak_bytes())
    words = f"{_described(case)}; read and prepared in {spent}, {held} at the peak until then"
    give_back_memory()
    report = infer(replace(asked, volume=case.data, output="labels" if streams else "maps"))
    del case
    give_back_memory()
    began = time.perf_counter()
    labels = images.as_stored(_labels(between, model, frame, streams=streams))
    content = header.content(labels, {**record, "plan": report.plan.to_json()}, packed=target.suffix == ".gz")
    write_asked(target, content, overwrite=replaces)
    sync_folder(target.parent)
    remove(between)
    labelled = human_seconds(time.perf_counter() - began)
    report = replace(
        report,
        output=target,
        peak_bytes=peak_bytes(),
        earlier_peak_bytes=earlier,
        values=None,
        case=f"{words}; labels written in {labelled}",
        warnings=(*model.notes, *report.warnings),
    )
    log_phase("finished", f"{target}: {report.case}")
    return report


def _check_options(asked: InferOptions) -> None:
    """Raise ShapeError for options that a case of nnU-Net does not have."""
    default = {of.name: of.default for of in fields(InferOptions)}
    for names, why in (
        (PART_OF_A_CASE, "predicts whole cases, whose voxels are all there"),
        (OF_THE_MODEL, "has the windows and weights that it was trained with"),
        (OF_CLUSTERS, "is computed by one process"),
        (OF_THE_LABELS, "gives labels, written as nnU-Net writes them"),
        (("record",), "prepares and labels cases, of which no record is kept"),
    ):
        given = [option(name) for name in names if _is_given(getattr(asked, name), default[name])]
        if given:
            raise ShapeError(f"a model of nnU-Net {why}: leave out {' and '.join(given)}")
    if asked.output not in ("maps", "labels"):
        raise ShapeError(f"a model of nnU-Net gives labels: leave out {option('output', asked.output)}")


def _is_given(value: object, default: object) -> bool:
    """Return whether an option is not its default; an array is never one."""
    return value is not default and not (isinstance(value, type(default)) and value == default)


def _record(model: NnunetModel, asked: InferOptions, files: tuple[Path, ...]) -> dict[str, Any]:
    """Return what decides the labels of a case, as JSON holds it."""
    network = read_asked(asked.network, asked).network
    assert network.windows is not None, "the meaning is windows"
    read = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            read.update(hashlib.file_digest(opened, "sha256").digest())
    return {
        "network": network.sha256,
        "weights": sha256(model.weights),
        "windows": repr(network.windows),
        "case": read.hexdigest(),
    }


def _finished(target: Path, record: Mapping[str, Any]) -> Report:
    """Return the report on labels that are complete; ResumeError if they were made in another way."""
    found = record_of(target)
    if found is None:
        raise ResumeError(
            f"{target} exists and holds no labels that znnpy wrote; give {option('overwrite', True)} to replace it, or "
            f"another {option('out')}"
        )
    other = [key for key, value in record.items() if found.get(key) != value]
    if other:
        raise ResumeError(
            f"{target} was made with other {' and '.join(other)}; give {option('overwrite', True)} to replace it, or "
            f"another {option('out')}"
        )
    try:
        plan = RunPlan.from_json(str(found.get("plan")))
    except PlanFileError as error:
        raise ResumeError(f"{target} is complete, but what it says of its plan is damaged: {error}") from None
    return Report(target, prod(plan.output), 0, 0.0, {}, peak_bytes(), plan, this_machine().blas, ())


def _check_memory(preparing: int, ram: int | str | None) -> None:
    """Raise NoPlanError if preparing a case would take more memory than the process may."""
    needed, allowed = process_bytes() + LIBRARIES_BYTES + preparing, limits_of(this_machine(), ram).ram_bytes
    if needed > allowed:
        error = NoPlanError(
            f"preparing the case takes up to {mebibytes(needed)}, and {option('ram')} allows {mebibytes(allowed)}; "
            "allow more"
        )
        error.needed_bytes = needed
        raise error


def _described(case: NnunetCase) -> str:
    """Describe what was made of the images of a case."""
    words = f"{text(case.size)} voxels"
    if case.crop.size != case.size:
        words += f", cropped to {text(case.crop.size)}"
    z, y, x = case.data.shape[1:]
    return f"{words}, resampled to {text((z, y, x))}" if case.is_resampled else words


def _labels(path: Path, model: NnunetModel, case: NnunetCase, *, streams: bool) -> Labels:
    """Return the labels of a case from what windows gave.

    streams  these are labels already
    """
    with h5py.File(path) as file:
        found = file[DATASET]
        if streams:
            return placed(np.asarray(found).reshape(case.crop.size), case, model.plans)
        return labels_of(lambda one: np.asarray(found[one]), model.dataset.heads, case, model.plans, model.dataset)
