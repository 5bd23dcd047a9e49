"""Compare an imported network with the framework that it comes from, on a random volume."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.admissible import admissible, refuse_non_local
from znnpy.errors import MissingExtraError, NetworkFileError, ShapeError
from znnpy.extras import install
from znnpy.files import open_regular
from znnpy.formats.npy import read_npy_header
from znnpy.geometry import vector
from znnpy.importing.aten_walk import IGNORED
from znnpy.importing.finish import RefusedSizeError
from znnpy.importing.imported import Imported
from znnpy.importing.processing import Processing
from znnpy.importing.program import Program, Ref
from znnpy.importing.pt2_file import read_pt2
from znnpy.lattices import period_along
from znnpy.messages import excerpt, option
from znnpy.network import Network
from znnpy.shapes import Vec3, ceil_divide, multiply, text
from znnpy.trained import TrainedNetwork
from znnpy.volume.array import ArrayVolume
from znnpy.volume.statistics import with_statistics
from znnpy.windows.settings import Windows

Array = npt.NDArray[np.float32]
Run = Callable[[Array], list[Array]]  # (channels, z, y, x) -> each output (maps, z, y, x)
LARGEST_SIZE = 400  # voxels along each axis of a volume that is tried
ALLOWED = 1e-5  # of the largest value of an output
ALLOWED_TESTED = 1e-3  # where the arrays are of other machines and versions
MOST_TESTED = 2**27  # values of an array of a test
_WORDS = {"dtype", "layout", "memory_format"}  # arguments that programs have as words
_PAD_MODES = {"reflect": "reflect", "replicate": "edge", "zeros": "constant"}


@dataclass(frozen=True, slots=True)
class Difference:
    """How far an output of znnpy is from the framework's.

    largest  difference of two values, and `scale` the largest value of the framework
    tested   the values are those of a description of bioimage.io, and not of a random volume
    """

    output: str
    largest: float
    scale: float
    tested: bool = False

    @property
    def allowed(self) -> float:
        """Return the share of the largest value that is allowed."""
        return ALLOWED_TESTED if self.tested else ALLOWED

    @property
    def within(self) -> bool:
        """Return whether the difference is one of rounding."""
        return self.largest <= self.allowed * max(self.scale, 1e-30)


def check_model(path: Path, made: Imported) -> tuple[Vec3, list[Difference]]:
    """Compare the network of an .onnx or .pt2 file, or of a description, with what its framework computes.

    Returns the size of the volume, and how far each output is off.
    """
    path = made.file or path
    pt2 = path.suffix.lower() == ".pt2"
    run = run_program(read_pt2(path), made.words, planar=made.planar) if pt2 else run_onnx(path, made)
    if made.processing is not None:
        run = _processed(run, made.processing)
    try:
        size, found = compared(made, run, made.fixed)
    except RefusedSizeError:  # of an odd size, as where voxels become maps: then a whole number of periods
        size, found = compared(made, run, vector(4 * n for n in period_along(made.network)))
    return size, [*found, *compared_tested(made)]


def compared(made: Imported, run: Run, size: Vec3 | None = None, seed: int = 0) -> tuple[Vec3, list[Difference]]:
    """Return the size of a random volume, and how far each output is from what the framework gives for it.

    run   the framework; it gets the volume after normalisation, padded as the network says
    size  of the volume; None: a small one with odd sizes

    ShapeError: the network is one that no meaning computes, or no small volume suits it.
    """
    network = made.network
    if network.wiring is not None and network.pad_to_period == "refuse":
        network = replace(network, wiring=replace(network.wiring, pad_to_period="reflect"))
    network, size = _of_whole_volume(network, odd_size(network) if size is None else size)
    volume = np.random.default_rng(seed).standard_normal((network.input_channels, *size), np.float32)
    net = TrainedNetwork(network, made.weights)
    ours = net(volume, calibrate=False)
    network, given = with_statistics(network, ArrayVolume(volume)), volume
    padded = admissible(as_one_image(network), size).volume
    if padded != size:
        width = [(0, 0), *((0, p - n) for p, n in zip(padded, size, strict=True))]
        given = np.pad(given, width, _PAD_MODES[network.pad_to_period])  # type: ignore[call-overload]
    found = []
    ends = np.cumsum([0, *network.output_maps]).tolist()
    results = run(np.ascontiguousarray(_normalised(network, given)))
    for word, begin, end, theirs in zip(made.words, ends, ends[1:], results, strict=False):
        own = ours[begin:end]
        inside = theirs[:, *(slice(0, n) for n in own.shape[1:])]
        found.append(Difference(word, float(np.abs(own - inside).max()), float(np.abs(inside).max())))
    return size, found


def _of_whole_volume(network: Network, size: Vec3) -> tuple[Network, Vec3]:
    """Return a network that computes a whole volume at once, as frameworks do, and the size of that.

    A network whose voxels depend on the whole volume is computed in one window, of whole periods: for others it may
    give a result of another size.
    """
    if network.is_local:
        return replace(network, asked_meaning="whole"), size
    periods = multiply(ceil_divide(size, period_along(network)), period_along(network))
    size = admissible(as_one_image(network), periods).volume
    return replace(network, asked_meaning="windows", windows=Windows(size, (0.0, 0.0, 0.0), "constant")), size


def compared_tested(made: Imported) -> list[Difference]:
    """Return how far outputs are from the arrays of a description's test; nothing if it has none that can be used.

    They can be used if the network gives the volume of their size as it is, since they are made without padding.
    """
    tested = None if made.tested is None else made.tested()
    if tested is None:
        return []
    volume = _tested(tested.input, made.order)
    if volume is None or not _suits(made.network, vector(volume.shape[1:])):
        return []
    network = made.network
    if not network.is_local:
        network, _ = _of_whole_volume(network, vector(volume.shape[1:]))
    ours = TrainedNetwork(network, made.weights)(volume, calibrate=False)
    ends = np.cumsum([0, *made.network.output_maps]).tolist()
    found = []
    for word, begin, end, path, order in zip(made.words, ends, ends[1:], tested.outputs, tested.orders, strict=False):
        theirs = _tested(path, order)
        if theirs is not None and theirs.shape == ours[begin:end].shape:
            apart, scale = np.abs(ours[begin:end] - theirs).max(), np.abs(theirs).max()
            found.append(Difference(word, float(apart), float(scale), tested=True))
    return found


def _suits(network: Network, size: Vec3) -> bool:
    """Return whether a network computes a volume of a size without padding it."""
    try:
        if network.meaning == "sliding":
            network.dense_size(size)
            return True
        if not network.is_local and any(n % p for n, p in zip(size, period_along(network), strict=True)):
            return False
        return admissible(as_one_image(network), size).volume == size
    except ShapeError:
        return False


def _tested(path: Path, order: str) -> Array | None:
    """Read an array of a test as (channels, z, y, x); None if it is one of several volumes, or not of these axes."""
    try:
        with open_regular(path) as file:
            header = read_npy_header(file)
        if header.dtype.kind not in "iuf" or prod(header.shape) > MOST_TESTED:
            raise NetworkFileError(f"{path} holds {header.dtype} {excerpt(header.shape)}, which is no array of a test")
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise NetworkFileError(f"{path} cannot be read as a .npy array: {excerpt(error)}; download it again") from None
    if array.ndim != len(order) or array.shape[order.index("n")] != 1:
        return None
    moved = array.transpose([order.index(letter) for letter in "nczyx" if letter in order])[0]
    for axis, letter in enumerate("czyx"):
        if letter not in order:
            moved = np.expand_dims(moved, axis)
    return np.ascontiguousarray(moved, np.float32 if moved.dtype.kind == "f" else None)


def _processed(run: Run, processing: Processing) -> Run:
    """Return how a framework runs with what a description does before and behind it, in float64."""

    def processed(volume: Array) -> list[Array]:
        given = volume.astype(np.float64)
        for step in processing.before:
            given = step.applied(given)
        found = []
        for maps, one in zip(run(given.astype(np.float32)), processing.outputs, strict=True):
            result = maps.astype(np.float64)
            for step in one.steps:
                result = step.applied(result)
            found.append(result.astype(np.float32))
        return found

    return processed


def _normalised(network: Network, volume: Array) -> Array:
    if network.normalise is None:
        return volume
    mean, std = (
        np.array(one, np.float32)[:, None, None, None] for one in (network.normalise.mean, network.normalise.std)
    )
    return (volume - mean) / std


def as_one_image(network: Network) -> Network:
    """Return a network that is computed on an image which is never divided, so that norms may depend on all of it."""
    return replace(network, asked_meaning="windows")


def odd_size(network: Network) -> Vec3:
    """Return a small size, odd along each axis, for which the network gives a few voxels."""
    refuse_non_local(as_one_image(network))
    refused: ShapeError | None = None
    for n in range(2 * max(period_along(network)) + 9, LARGEST_SIZE, 2):
        size = vector(n + 2 * axis for axis in range(3))
        try:
            admissible(as_one_image(network), size)
        except ShapeError as error:
            refused = refused or error
        else:
            return size
    raise refused or ShapeError(f"the network takes no volume of up to {LARGEST_SIZE} voxels along each axis")


def run_module(module: Any, words: Sequence[str], *, planar: bool) -> Run:
    """Return how PyTorch runs a module."""
    import torch

    def run(volume: Array) -> list[Array]:
        x = torch.from_numpy(_batched(volume, planar))
        with torch.no_grad():
            found = module(x)
        found = [found] if isinstance(found, torch.Tensor) else found
        chosen = [found[word] for word in words] if isinstance(found, dict) else [found[int(word)] for word in words]
        return [_unbatched(one.numpy(), planar) for one in chosen]

    return run


def run_program(program: Program, words: Sequence[str], *, planar: bool) -> Run:
    """Return how PyTorch runs a program, operator by operator: nothing else of its file is loaded."""
    try:
        import torch
    except ImportError:
        raise MissingExtraError(f"{option('check')} of a .pt2 file needs PyTorch; `{install('torch')}`") from None

    def run(volume: Array) -> list[Array]:
        values: dict[str, Any] = {name: torch.from_numpy(np.array(a)) for name, a in program.constants.items()}
        values[program.inputs[0][0]] = torch.from_numpy(_batched(volume, planar))

        def given(value: object) -> Any:
            if isinstance(value, Ref):
                return values[value.name]
            return [given(one) for one in value] if isinstance(value, list | tuple) else value

        with torch.no_grad():
            for call in program.calls:
                operator, overload = call.target.removeprefix("aten.").split(".")
                if operator in IGNORED:
                    continue
                arguments = {key: given(value) for key, value in call.arguments.items() if key != "pin_memory"}
                if "device" in arguments:
                    arguments["device"] = torch.device("cpu")
                for key in _WORDS & arguments.keys():
                    if isinstance(word := arguments[key], str):
                        arguments[key] = getattr(torch, word.removeprefix("torch."))
                result = getattr(getattr(torch.ops.aten, operator), overload)(**arguments)
                many = result if isinstance(result, list | tuple) else [result]
                values.update(zip(call.results, many, strict=False))
        return [_unbatched(values[program.outputs[word]].numpy(), planar) for word in words]

    return run


def run_onnx(path: Path, made: Imported) -> Run:
    """Return how onnxruntime runs a file."""
    try:
        import onnxruntime
    except ImportError:
        raise MissingExtraError(
            f"{option('check')} of an .onnx file needs onnxruntime; `{install('onnxruntime')}`"
        ) from None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised too
    with _runtime_errors(path):
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (first,) = session.get_inputs()
    if "float16" in first.type:
        raise NetworkFileError(f"{path} takes float16, which is not compared; save it with float32")

    def run(volume: Array) -> list[Array]:
        last = made.order.endswith("c")
        batches = _batched(volume, made.planar)
        given = [x[None] for x in (np.moveaxis(batches, 1, -1) if last else batches)]  # files may be for a batch of 1
        with _runtime_errors(path):
            parts = [session.run(list(made.words), {first.name: x}) for x in given]
        found = [np.concatenate(of) for of in zip(*parts, strict=True)]
        return [_unbatched(np.moveaxis(one, -1, 1) if last else one, made.planar) for one in found]

    return run


@contextmanager
def _runtime_errors(path: Path) -> Iterator[None]:
    """Turn the errors of onnxruntime, which have no class in common, into a NetworkFileError."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    known = [one for one in vars(state).values() if isinstance(one, type) and issubclass(one, Exception)]
    errors: tuple[type[Exception], ...] = (RuntimeError, ValueError, *known)
    try:
        yield
    except errors as error:
        raise RefusedSizeError(
            f"{path} cannot be compared, since onnxruntime does not run it ({excerpt(error, 200)}); import it without "
            f"{option('check')}, and compare with the framework that it comes from"
        ) from error


def _batched(volume: Array, planar: bool) -> Array:
    """Return (channels, z, y, x) as a framework takes it: a batch of one volume, or of images."""
    return np.ascontiguousarray(np.moveaxis(volume, 0, 1) if planar else volume[None])


def _unbatched(found: Array, planar: bool) -> Array:
    return np.moveaxis(found, 1, 0) if planar else found[0]


def lines_of(size: Vec3, differences: Sequence[Difference], framework: str) -> list[str]:
    """Say what was compared, and how it came out."""
    lines = []
    for one in differences:
        verdict = "equal but for rounding" if one.within else f"more than {one.allowed:g} of it: the import is wrong"
        given = "arrays of the description" if one.tested else f"{text(size)} random voxels, {framework}"
        lines.append(
            f"check       {given}: output {one.output} differs by {one.largest:.1e} at "
            f"most, with values up to {one.scale:.3g}; {verdict}"
        )
    return lines
