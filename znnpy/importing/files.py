"""Read network files of other frameworks, each with the reader of its kind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from znnpy.errors import NetworkFileError, ShapeError
from znnpy.importing.description import read_description
from znnpy.importing.finish import Wishes
from znnpy.importing.imported import Imported
from znnpy.importing.recognised import is_described
from znnpy.messages import excerpt


def imported_file(path: Path, wishes: Wishes, name: str | None = None) -> Imported:
    """Return the network of an .onnx or .pt2 file, or of a description, called `name` or else as the file says.

    NetworkFileError for whatever is wrong with the file, which names it; OSError if it cannot be read;
    MissingExtraError if a package is missing.
    """
    if is_described(path):
        return _described(path, wishes, name)
    name = name or excerpt(path.stem)
    try:
        if path.suffix.lower() == ".onnx":
            from znnpy.importing.onnx_network import imported_onnx

            return imported_onnx(path, name, wishes)
        from znnpy.importing.pt2_network import imported_pt2

        return imported_pt2(path, name, wishes)
    except NetworkFileError as error:
        raise error if str(path) in str(error) else error.with_context(str(path)) from None
    except ShapeError as error:
        raise NetworkFileError(f"{path}: {error}") from None


def _described(path: Path, wishes: Wishes, name: str | None) -> Imported:
    """Return the network of a description of bioimage.io."""
    description = read_description(path, wishes)
    try:
        model = description.model()
    except NetworkFileError as error:
        raise error.with_context(str(description.path)) from None
    made = imported_file(model, description.wishes, name or description.name or excerpt(path.parent.name) or "network")
    description.check_order(made.order, model.name)
    return replace(
        made,
        source=f"bioimage.io, {model.name}: {made.source}",
        file=model,
        processing=description.wishes.processing,
        tested=description.tested,
    )
