"""Read the pre- and postprocessing of a bioimage.io model description, versions 0.4 and 0.5.

A step has a word, `name` in 0.4 and `id` in 0.5, and `kwargs`. Some of its parameters have different forms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from znnpy.errors import NetworkFileError
from znnpy.formats.entries import FLOAT32_MAX, FLOAT32_TINY, Entry, Finite, Percentile, Positive, check
from znnpy.formats.files import shown, suggestion
from znnpy.importing.processing import Affine, Apply, Step
from znnpy.messages import excerpt, option
from znnpy.network import Normalise
from znnpy.normalisation import EPSILON, VolumeStatistics

NUMBERS = "a finite number, or a list with one per channel"
MODES = ("fixed", "per_sample", "per_dataset")
AXES = "letters such as zyx (format 0.4), or a list of ids of axes (0.5)"
DTYPES = "the name of a type, such as float32"
_DO_IT = "delete the step from the description, and do it to what znnpy writes"
_REFUSED = {
    "binarize": f"is no layer of a network; {_DO_IT}",
    "scale_mean_variance": f"needs statistics of the whole output; {_DO_IT}",
    "stardist_postprocessing": f"makes objects of the whole output; {_DO_IT}",
    "cellpose_flow_dynamics": f"makes objects of the whole output; {_DO_IT}",
    "custom": f"runs a program of the description's author, and no code of a description is run; {_DO_IT}",
}


def _numbers(value: object) -> object:
    return tuple(value) if isinstance(value, list) else (value,)


Numbers = Annotated[tuple[Finite, ...], Field(min_length=1), BeforeValidator(_numbers)]
Positives = Annotated[tuple[Positive, ...], Field(min_length=1), BeforeValidator(_numbers)]
Epsilon = Annotated[float, Field(gt=0, le=0.1)]
Mode = Literal["fixed", "per_sample", "per_dataset"]


class _NoneEntry(Entry):
    """A step without parameters."""


class _FixedEntry(Entry):
    mean: Numbers = Field(description=NUMBERS, examples=["130.0"])
    std: Positives = Field(description=f"{NUMBERS}, above 0", examples=["33.5"])
    axis: str | None = Field(None, description="the id of an axis", examples=["channel"])


class _ZeroMeanEntry(Entry):
    mode: Mode | None = Field(None, description=f"one of {', '.join(MODES)}", examples=["per_sample"])
    axes: str | list[str] | None = Field(None, description=AXES, examples=["zyx"])
    mean: Numbers | None = Field(None, description=NUMBERS, examples=["130.0"])
    std: Positives | None = Field(None, description=f"{NUMBERS}, above 0", examples=["33.5"])
    eps: Epsilon = Field(EPSILON, description="a number above 0, up to 0.1", examples=["1.0e-6"])


class _ScaleRangeEntry(Entry):
    mode: Mode | None = Field(None, description=f"one of {', '.join(MODES[1:])}", examples=["per_sample"])
    axes: str | list[str] | None = Field(None, description=AXES, examples=["zyx"])
    min_percentile: Percentile = Field(0.0, description="a number from 0 to 100", examples=["1.0"])
    max_percentile: Percentile = Field(100.0, description="a number from 0 to 100", examples=["99.8"])
    eps: Epsilon = Field(EPSILON, description="a number above 0, up to 0.1", examples=["1.0e-6"])
    reference_tensor: str | None = Field(None, description="the id of a tensor", examples=["raw"])


class _ScaleLinearEntry(Entry):
    gain: Numbers = Field((1.0,), description=NUMBERS, examples=["2.0"])
    offset: Numbers = Field((0.0,), description=NUMBERS, examples=["0.5"])
    axis: str | None = Field(None, description="the id of an axis", examples=["channel"])
    axes: str | list[str] | None = Field(None, description=AXES, examples=["zyx"])


class _ClipEntry(Entry):
    min: Finite | None = Field(None, description="a finite number", examples=["0.0"])
    max: Finite | None = Field(None, description="a finite number", examples=["1.0"])
    min_percentile: Percentile | None = Field(None, description="a number from 0 to 100", examples=["1.0"])
    max_percentile: Percentile | None = Field(None, description="a number from 0 to 100", examples=["99.8"])
    axes: str | list[str] | None = Field(None, description=AXES, examples=["zyx"])


class _DtypeEntry(Entry):
    dtype: str = Field(description=DTYPES, examples=["float32"])


class _SoftmaxEntry(Entry):
    axis: str = Field("channel", description="the id of an axis", examples=["channel"])


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor: its axes n, c, z, y, x in order, the letter of the id of each, and the maps if it says how many."""

    name: str
    order: str
    letters: dict[str, str]
    maps: int | None = None

    @property
    def space(self) -> set[str]:
        """Return the letters of spatial axes."""
        return set(self.order) & set("zyx")

    def named(self, axes: str | Sequence[str], where: str) -> set[str]:
        """Return the letters of axes that parameters name; NetworkFileError for one that the tensor lacks."""
        found = set()
        for axis in axes:
            if axis not in self.letters:
                raise NetworkFileError(
                    f"{where}names the axis {shown(axis)}, which the tensor lacks; {suggestion(axis, self.letters)}"
                )
            found.add(self.letters[axis])
        return found

    def check_channels(self, axis: str | None, where: str) -> None:
        """Raise NetworkFileError unless an axis is that of the channels, or none is named."""
        if axis is not None and self.named([axis], where) != {"c"}:
            raise NetworkFileError(f"{where}is along {shown(axis)}, and only steps along the channels can be computed")


@dataclass(frozen=True, slots=True)
class Before:
    """The steps before a network: a normalisation, or statistics of the volume that it follows from, then layers."""

    normalise: Normalise | None = None
    statistics: VolumeStatistics | None = None
    steps: tuple[Step, ...] = ()


def preprocessing(raw: object, layout: Layout, where: str, given: Normalise | None = None) -> Before:
    """Return what comes before a network; NetworkFileError for a step that cannot be computed.

    given  the user's normalisation, which replaces one by statistics and no other
    """
    made = Before()
    for word, kwargs, here in _steps(raw, where):
        if given is not None and made == Before() and _needs_statistics(word, kwargs, here):
            made = Before(normalise=given)
            continue
        whole = _statistics(word, kwargs, layout, here)
        if whole is None:
            made = _with(made, _step(word, kwargs, layout, here))
        elif made != Before():
            raise NetworkFileError(
                f"{here}comes after another step, and statistics of the whole volume are known of its grey values "
                "alone; put it first"
            )
        else:
            made = Before(statistics=whole)
    if given is not None and made == Before():
        return Before(normalise=given)
    if given is not None and made.normalise is not given:
        raise NetworkFileError(f"{where} says how grey values are normalised; leave out {option('normalise')}")
    return made


def postprocessing(raw: object, layout: Layout, where: str) -> tuple[Step, ...]:
    """Return the layers behind an output; NetworkFileError for a step that cannot be computed."""
    found = []
    for word, kwargs, here in _steps(raw, where):
        if _needs_statistics(word, kwargs, here):
            raise NetworkFileError(f"{here}needs statistics of the whole output; {_DO_IT}")
        found += _layers(_step(word, kwargs, layout, here))
    return tuple(found)


def _steps(raw: object, where: str) -> list[tuple[str, Any, str]]:
    """Return word and parameters of each step, and where it is in errors."""
    if raw is None:
        return []
    if not isinstance(raw, list):
        raise NetworkFileError(f"{where} is {shown(raw)}, but must be a list of steps")
    found = []
    for index, entry in enumerate(raw):
        word = entry.get("id", entry.get("name")) if isinstance(entry, dict) else None
        if not isinstance(word, str):
            raise NetworkFileError(f"{where} {index}: expected a step with id (or name, in 0.4), not {shown(entry)}")
        found.append((word, entry.get("kwargs") or {}, f"{where} {index} ({excerpt(word, 40)}): "))
    return found


def _with(made: Before, steps: Sequence[Step | Normalise]) -> Before:
    """Return a preprocessing with more steps; the first becomes the normalisation if it can."""
    for step in steps:
        first = _as_normalise(step) if made == Before() else None
        made = Before(normalise=first) if first else replace(made, steps=(*made.steps, *_layers([step])))
    return made


def _layers(steps: Sequence[Step | Normalise]) -> list[Step]:
    """Return steps with normalisations as factors and offsets."""
    found: list[Step] = []
    for step in steps:
        if isinstance(step, Normalise):
            factor = tuple(1 / std for std in step.std)
            step = Affine(factor, tuple(-mean * f for mean, f in zip(step.mean, factor, strict=True)))
        found.append(step)
    return found


def _as_normalise(step: Step | Normalise) -> Normalise | None:
    """Return (x - mean) / std that is the same as a step; None if there is none."""
    if isinstance(step, Normalise):
        return step
    if not isinstance(step, Affine) or min(step.factor) <= 0:
        return None
    channels = max(len(step.factor), len(step.offset))
    factor, offset = step.factor * (channels // len(step.factor)), step.offset * (channels // len(step.offset))
    std = tuple(1 / one for one in factor)
    mean = tuple(-two / one for one, two in zip(factor, offset, strict=True))
    if max(std) > FLOAT32_MAX or min(std) < FLOAT32_TINY or max(map(abs, mean)) > FLOAT32_MAX:
        return None
    return Normalise(mean, std)


def _needs_statistics(word: str, kwargs: Any, here: str) -> bool:
    """Return whether a step normalises by values that it does not state."""
    if word == "zero_mean_unit_variance":
        entry = check(_ZeroMeanEntry, kwargs, here)
        return entry.mode != "fixed" and (entry.mode is not None or entry.mean is None)
    return word == "scale_range"


def _statistics(word: str, kwargs: Any, layout: Layout, here: str) -> VolumeStatistics | None:
    """Return the statistics of the whole volume that a step needs; None if it needs none."""
    if not _needs_statistics(word, kwargs, here):
        return None
    if word == "zero_mean_unit_variance":
        entry = check(_ZeroMeanEntry, kwargs, here)
        jointly = _jointly(entry.mode, entry.axes, layout, here)
        return VolumeStatistics("mean_and_std", jointly, epsilon=entry.eps)
    scale = check(_ScaleRangeEntry, kwargs, here)
    if scale.reference_tensor is not None and scale.reference_tensor != layout.name:
        raise NetworkFileError(
            f"{here}takes its percentiles of the tensor {shown(scale.reference_tensor)}, and only those of the input "
            "itself are computed; delete reference_tensor"
        )
    low, high = scale.min_percentile, scale.max_percentile
    if low >= high:
        raise NetworkFileError(f"{here}min_percentile {low:g} is not below max_percentile {high:g}; correct them")
    jointly = _jointly(scale.mode, scale.axes, layout, here)
    return VolumeStatistics("percentiles", jointly, (low, high), scale.eps)


def _jointly(mode: Mode | None, axes: str | list[str] | None, layout: Layout, here: str) -> bool:
    """Return whether statistics are of all channels together; NetworkFileError unless they are of a whole volume."""
    named = layout.space | {"c"} if axes is None else layout.named(axes, here)
    if mode == "per_dataset" or "n" in named:
        raise NetworkFileError(
            f"{here}needs statistics of a whole data set; write its mean and std with mode fixed (format 0.4) or as "
            "fixed_zero_mean_unit_variance (0.5)"
        )
    if "z" not in layout.order:
        raise NetworkFileError(
            f"{here}is of each image, and the images of a volume are normalised alike; write fixed values of mean and "
            "std into the description"
        )
    if not layout.space <= named:
        missing = ", ".join(sorted(layout.space - named))
        raise NetworkFileError(
            f"{here}has statistics of parts along {missing}, and only those of a whole volume are computed; name all "
            "spatial axes"
        )
    return "c" in named


def _step(word: str, kwargs: Any, layout: Layout, here: str) -> Sequence[Step | Normalise]:
    """Return the layers of a step that needs no statistics."""
    if word in _REFUSED:
        raise NetworkFileError(f"{here}{_REFUSED[word]}")
    if word not in _STEPS:
        raise NetworkFileError(f"{here}is not known; {suggestion(word, _STEPS)}")
    return _STEPS[word](kwargs, layout, here)


def _normalised(mean: Sequence[float], std: Sequence[float], epsilon: float, here: str) -> list[Normalise]:
    if len(mean) != len(std) and 1 not in (len(mean), len(std)):
        raise NetworkFileError(f"{here}has {len(mean)} values of mean and {len(std)} of std; write as many of both")
    channels = max(len(mean), len(std))
    means, deviations = (tuple(one) * (channels // len(one)) for one in (mean, std))
    return [Normalise(means, tuple(one + epsilon for one in deviations))]


def _fixed(kwargs: Any, layout: Layout, here: str) -> list[Normalise]:
    entry = check(_FixedEntry, kwargs, here)
    layout.check_channels(entry.axis, here)
    return _normalised(entry.mean, entry.std, 0.0, here)


def _zero_mean(kwargs: Any, layout: Layout, here: str) -> list[Normalise]:
    entry = check(_ZeroMeanEntry, kwargs, here)
    if entry.mean is None or entry.std is None:
        raise NetworkFileError(f"{here}has fixed values, and no {'mean' if entry.mean is None else 'std'}; add it")
    return _normalised(entry.mean, entry.std, entry.eps, here)


def _scale_linear(kwargs: Any, layout: Layout, here: str) -> list[Step]:
    entry = check(_ScaleLinearEntry, kwargs, here)
    layout.check_channels(entry.axis, here)
    if entry.axes is not None and not layout.space <= layout.named(entry.axes, here):
        raise NetworkFileError(f"{here}has factors along a spatial axis, and only those of channels can be computed")
    return [Affine(entry.gain, entry.offset)]


def _clip(kwargs: Any, layout: Layout, here: str) -> list[Step]:
    entry = check(_ClipEntry, kwargs, here)
    if entry.min_percentile is not None or entry.max_percentile is not None:
        raise NetworkFileError(
            f"{here}is at percentiles, which is not computed; use scale_range with these percentiles, and clip to 0 "
            "and 1 behind it"
        )
    low = -FLOAT32_MAX if entry.min is None else entry.min
    high = FLOAT32_MAX if entry.max is None else entry.max
    if low >= high:
        raise NetworkFileError(f"{here}min is {low:g} and max is {high:g}; write a min below max")
    return [Apply("clip", (low, high))]


def _dtype(kwargs: Any, layout: Layout, here: str) -> list[Step]:
    dtype = check(_DtypeEntry, kwargs, here).dtype
    if dtype != "float32":
        raise NetworkFileError(
            f"{here}makes values {shown(dtype)}, and networks are computed in float32; write float32, or delete the "
            "step"
        )
    return []


def _sigmoid(kwargs: Any, layout: Layout, here: str) -> list[Step]:
    check(_NoneEntry, kwargs, here)
    return [Apply("sigmoid")]


def _softmax(kwargs: Any, layout: Layout, here: str) -> list[Step]:
    layout.check_channels(check(_SoftmaxEntry, kwargs, here).axis, here)
    return [Apply("softmax")]


_STEPS: dict[str, Callable[[Any, Layout, str], Sequence[Step | Normalise]]] = {
    "fixed_zero_mean_unit_variance": _fixed,
    "zero_mean_unit_variance": _zero_mean,
    "scale_linear": _scale_linear,
    "clip": _clip,
    "ensure_dtype": _dtype,
    "sigmoid": _sigmoid,
    "softmax": _softmax,
}
