"""The grammar of network.yaml.

Each mapping in the file is an entry: a pydantic model with descriptions of what is accepted and examples of what to
write. Messages are made from these; users never see those of pydantic.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from znnpy.errors import NetworkFileError
from znnpy.formats.files import COUNT, LARGEST, shown, suggestion
from znnpy.formats.yaml12 import read_yaml
from znnpy.network import Conv, Layer, MaxFilter, Maxout, Network, Normalise, Pool
from znnpy.shapes import ACTIVATIONS, Activation, Vec3

FLOAT32_MAX = 3.4028234e38
FLOAT32_TINY = 1.1754944e-38


class Parsed(NamedTuple):
    """The content of a network.yaml. `weights` is relative to it; `field_of_view` is not yet checked."""

    network: Network
    weights: str | None
    field_of_view: Vec3 | None


def _triple(value: object) -> object:
    """Return a size as a tuple; a single number stands for a cube."""
    return tuple(value) if isinstance(value, list) else (value,) * 3


def _sequence(value: object) -> object:
    """Return one value per channel as a tuple; a single number stands for all channels."""
    return tuple(value) if isinstance(value, list) else (value,)


Count = Annotated[int, Field(ge=1, le=LARGEST)]
Size = Annotated[tuple[Count, Count, Count], BeforeValidator(_triple)]
Mean = Annotated[float, Field(ge=-FLOAT32_MAX, le=FLOAT32_MAX, allow_inf_nan=False)]
Std = Annotated[float, Field(ge=FLOAT32_TINY, le=FLOAT32_MAX, allow_inf_nan=False)]
LONGEST_LINE = 200  # characters
# These become attributes of the output and are printed, so they hold no characters that control a terminal.
Words = Annotated[str, Field(min_length=1, max_length=LONGEST_LINE, pattern=r"^[^\p{C}\p{Zl}\p{Zp}]+$")]

_SIZE = f"{COUNT} or three of them, [z, y, x]"
_ONE_LINE = f"text on one line of at most {LONGEST_LINE} characters"


class _Entry(BaseModel):
    """A mapping in the file. The description of a field says what is accepted, its example what to write."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @classmethod
    def example(cls, *keys: str) -> str:
        """Show how to write these keys, or all that are required."""
        chosen = keys or tuple(key for key, field in cls.model_fields.items() if field.is_required())
        return ", ".join(f"{key}: {(cls.model_fields[key].examples or ['...'])[0]}" for key in chosen)


class _ConvEntry(_Entry):
    type: Literal["conv"]
    kernel: Size = Field(description=_SIZE, examples=["[3, 3, 3]"])
    out: Count = Field(description=f"{COUNT} (maps)", examples=["16"])
    activation: Activation = Field("none", description=f"one of {', '.join(ACTIVATIONS)}", examples=["relu"])

    def layer(self) -> Layer:
        return Conv(self.kernel, self.out, self.activation)


class _PoolEntry(_Entry):
    type: Literal["pool"]
    window: Size = Field(description=_SIZE, examples=["[2, 2, 2]"])

    def layer(self) -> Layer:
        return Pool(self.window)


class _MaxFilterEntry(_Entry):
    type: Literal["maxfilter"]
    window: Size = Field(description=_SIZE, examples=["[2, 2, 2]"])

    def layer(self) -> Layer:
        return MaxFilter(self.window)


class _MaxoutEntry(_Entry):
    type: Literal["maxout"]
    of: Count = Field(description=f"{COUNT} (maps in a group)", examples=["2"])

    def layer(self) -> Layer:
        return Maxout(self.of)


_LAYERS: dict[str, type[_ConvEntry | _PoolEntry | _MaxFilterEntry | _MaxoutEntry]] = {
    "conv": _ConvEntry,
    "pool": _PoolEntry,
    "maxfilter": _MaxFilterEntry,
    "maxout": _MaxoutEntry,
}


class _NormaliseEntry(_Entry):
    mean: Annotated[tuple[Mean, ...], BeforeValidator(_sequence)] = Field(
        description="a finite number or one per input channel", examples=["130.0"]
    )
    std: Annotated[tuple[Std, ...], BeforeValidator(_sequence)] = Field(
        description="a finite number above 0 or one per input channel", examples=["33.5"]
    )


class _NetworkEntry(_Entry):
    name: Words | None = Field(None, description=_ONE_LINE, examples=["my_network"])
    description: str = Field("", description="text", examples=["what it was trained for"])
    input_channels: Count = Field(description=COUNT, examples=["1"])
    normalise: Any = None  # a _NormaliseEntry or empty, checked separately
    weights: Words | None = Field(None, description=f"the path of a file, as {_ONE_LINE}", examples=["my_network.npz"])
    layers: list[Any] = Field(  # entries of _LAYERS, each checked separately
        min_length=1,
        description="a list of at least one layer",
        examples=["[{type: conv, kernel: [3, 3, 3], out: 1}]"],
    )
    field_of_view: Size | None = Field(None, description=_SIZE, examples=["[27, 27, 27]"])


AnyEntry = TypeVar("AnyEntry", bound=_Entry)


def _check(entry: type[AnyEntry], raw: object, where: str) -> AnyEntry:
    """Check `raw` as an entry; NetworkFileError, which begins with `where`, for the first mistake in it."""
    if not isinstance(raw, dict):
        raise NetworkFileError(f"{where}expected a mapping, not {shown(raw)}; write {entry.example()}")
    for key in raw:
        if key not in entry.model_fields:
            raise NetworkFileError(f"{where}unknown key {shown(key)}; {suggestion(key, entry.model_fields)}")
    for key, field in entry.model_fields.items():
        if field.is_required() and key not in raw:
            raise NetworkFileError(f"{where}{key} is missing; add for example {entry.example(key)}")
    try:
        return entry.model_validate(raw)
    except ValidationError as error:
        key = str(error.errors(include_url=False)[0]["loc"][0])
        raise NetworkFileError(
            f"{where}{key} is {shown(raw[key])}, but must be {entry.model_fields[key].description}; "
            f"write for example {entry.example(key)}"
        ) from None


def parse(content: str, name: str) -> Parsed:
    """Read the network of a network.yaml; it is called `name` unless the file names it.

    NetworkFileError for the first mistake; ShapeError if a maxout does not divide its maps.
    """
    raw = read_yaml(content)
    if not isinstance(raw, dict):
        raise NetworkFileError(
            f"the file is {shown(raw)}, but must be a mapping; write at least {_NetworkEntry.example()}"
        )
    entry = _check(_NetworkEntry, raw, "")
    layers = tuple(_layer(index, layer) for index, layer in enumerate(entry.layers))
    normalise = _normalise(entry.normalise, entry.input_channels)
    network = Network(entry.name or name, entry.input_channels, layers, normalise)
    return Parsed(network, entry.weights, entry.field_of_view)


def _layer(index: int, raw: object) -> Layer:
    kinds = ", ".join(_LAYERS)
    if not isinstance(raw, dict):
        raise NetworkFileError(
            f"layer {index} is {shown(raw)}, but must be a mapping such as {{type: pool, window: [2, 2, 2]}}"
        )
    if "type" not in raw:
        raise NetworkFileError(f"layer {index}: type is missing; add one of {kinds}")
    kind = raw["type"]
    if not isinstance(kind, str) or kind not in _LAYERS:
        raise NetworkFileError(
            f"layer {index}: type is {shown(kind)}, which is not a layer type; {suggestion(kind, _LAYERS)}"
        )
    return _check(_LAYERS[kind], raw, f"layer {index} ({kind}): ").layer()


def _normalise(raw: object, channels: int) -> Normalise | None:
    if raw is None:
        return None
    entry = _check(_NormaliseEntry, raw, "normalise: ")
    mean, std = entry.mean, entry.std
    for key, values in (("mean", mean), ("std", std)):
        if len(values) not in (1, channels):
            raise NetworkFileError(
                f"normalise: {key} has {len(values)} values for input_channels: {channels}; "
                "write one number, or one per channel"
            )
    return Normalise(mean * (channels // len(mean)), std * (channels // len(std)))
