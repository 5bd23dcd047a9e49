"""Say what is wrong with a layer and with what it reads, as the end of a sentence that begins with the layer."""

from __future__ import annotations

from collections.abc import Sequence

from znnpy.layers import (
    FUNCTIONS,
    JOINS,
    PAD_MODES,
    Add,
    AveragePool,
    Conv,
    ConvTranspose,
    Layer,
    Maxout,
    Multiply,
    Norm,
    Pool,
    Upsample,
)
from znnpy.messages import excerpt
from znnpy.shapes import text

_LEAST = {  # the smallest value of each field, along each axis
    "kernel": 1, "window": 1, "stride": 1, "dilation": 1, "factor": 1, "out": 1, "of": 1, "groups": 1,
    "before": 0, "behind": 0, "output_padding": 0, "padding": 0,
}  # fmt: skip


def why_wrong(layer: Layer, names: Sequence[str], maps: Sequence[int]) -> str | None:
    """Return what is wrong with a layer, and what to do; None if nothing is.

    names  of the nodes that it reads, and their maps
    """
    return _inputs(layer, names) or _values(layer) or _maps(layer, names, maps) or _settings(layer)


def _inputs(layer: Layer, names: Sequence[str]) -> str | None:
    """Say that a join reads one node, or another layer several."""
    joins = isinstance(layer, JOINS)
    if joins and len(names) < 2:
        return (
            f"reads {_short(names[0])} alone, but joins two nodes or more; name them, for example from: "
            f"[{_short(names[0])}, OTHER]"
        )
    if not joins and len(names) > 1:
        return (
            f"reads {len(names)} nodes, {excerpt(', '.join(map(_short, names)))}, but takes one; join them before it "
            "with concat, add or multiply"
        )
    return None


def _values(layer: Layer) -> str | None:
    """Say which value is none that a layer can have; those of a network file were checked as they were read."""
    for field, least in _LEAST.items():
        value = getattr(layer, field, None)
        if value is None:
            continue
        sides = value if field == "padding" else (value,)
        sizes = [size for side in sides for size in (side if isinstance(side, tuple) else (side,))]
        if not all(isinstance(size, int) and size >= least for size in sizes):
            what = "whole numbers" if len(sizes) > 1 else "a whole number"
            return f"has {field} = {excerpt(value, 60)}, which must be {what} from {least} on; correct it"
    for field, known in (("activation", FUNCTIONS), ("function", FUNCTIONS), ("padding_mode", PAD_MODES)):
        value = getattr(layer, field, None)
        if value is not None and value not in known:
            return f"has {field} = {excerpt(repr(value), 60)}, which is none of {', '.join(known)}; choose one of them"
    if isinstance(layer, Upsample) and (layer.factor is None) == (layer.like is None):
        return "has a factor and a node whose size it gets, or neither; give one of them"
    return None


def _maps(layer: Layer, names: Sequence[str], maps: Sequence[int]) -> str | None:
    """Say why a layer cannot take so many maps of the nodes that it reads."""
    match layer:
        case Conv() | ConvTranspose() if maps[0] % layer.groups or layer.out % layer.groups:
            count, which = (maps[0], "maps it gets") if maps[0] % layer.groups else (layer.out, "maps it gives")
            return (
                f"has {layer.groups} groups, which do not divide the {count} {which}; change groups, or the number "
                "of maps"
            )
        case Norm() if maps[0] % layer.groups:
            return (
                f"has {layer.groups} groups, which do not divide the {maps[0]} maps it gets; change groups, or the "
                "number of maps"
            )
        case Maxout() if maps[0] % layer.of:
            return f"does not divide the {maps[0]} maps it gets; change of, or the number of maps"
        case Add() | Multiply():
            most = max(maps)
            for name, own in zip(names, maps, strict=True):
                if own not in (1, most):
                    largest = names[maps.index(most)]
                    return (
                        f"joins {_short(largest)} of {most} maps with {_short(name)} of {own}; give both the same "
                        "number of maps, or one of them a single map"
                    )
    return None


def _settings(layer: Layer) -> str | None:
    """Say which settings of a layer contradict each other."""
    match layer:
        case Pool() | AveragePool():
            for side in layer.padding:
                if any(2 * p > w for p, w in zip(side, layer.window, strict=True)):
                    return (
                        f"pads {text(side)} voxels, which is more than half of its window {text(layer.window)}; "
                        "write a smaller padding, or pad in a layer before it"
                    )
        case ConvTranspose():
            limit = tuple(max(s, d) for s, d in zip(layer.stride, layer.dilation, strict=True))
            if any(o >= most for o, most in zip(layer.output_padding, limit, strict=True)):
                return (
                    f"has the output_padding {text(layer.output_padding)}, which must be smaller than its stride "
                    f"{text(layer.stride)} or its dilation {text(layer.dilation)}; write a smaller one"
                )
    return None


def _short(name: str) -> str:
    return excerpt(name, 60)
