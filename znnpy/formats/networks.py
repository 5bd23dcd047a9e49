"""Read networks from `network.yaml`, from ZNNi's `.znni`, and from the package itself.

Every mistake in a file is a NetworkFileError of one sentence: where it is, what was read, what is accepted, what to do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from znnpy.errors import NetworkFileError, ShapeError
from znnpy.files import read_regular
from znnpy.formats import network_yaml, network_znni
from znnpy.formats.files import LARGEST, cannot_read, require_file
from znnpy.messages import excerpt
from znnpy.network import Network
from znnpy.option_values import Meaning
from znnpy.shapes import Vec3, text

DEFAULT = "fib25_boundary"
SHIPPED = (
    Path(__file__).parent.parent / "networks"
)  # real files, not importlib.resources: numpy and safetensors need them

SUFFIXES = (".yaml", ".yml", ".znni")
LARGEST_FILE = 2**18  # bytes; the largest network that is allowed is smaller


@dataclass(frozen=True)
class NetworkFile:
    """A network, the weights file that it names (`plan` does not need it to exist), and the file it was read from."""

    network: Network
    weights: Path | None
    path: Path


def shipped() -> tuple[str, ...]:
    """Return the names of the networks in the package; `read_network` takes them in place of a path."""
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.yaml")))


def read_network(where: str | Path, meaning: Meaning | None = None) -> NetworkFile:
    """Read a .yaml, .yml or .znni file, or the network of the package that `where` names.

    meaning  meaning over a volume; None: the one that the file names, or the usual one of such a network

    NetworkFileError for whatever is wrong with the file; ShapeError if the network does not have that meaning.
    """
    file = _read(where)
    return file if meaning is None else replace(file, network=replace(file.network, asked_meaning=meaning))


def _read(where: str | Path) -> NetworkFile:
    path = Path(where)
    try:
        if not path.is_file() and str(where) in shipped():
            path = SHIPPED / f"{where}.yaml"
        require_file(path, "network", SUFFIXES, also=shipped())
        content = _read_text(path)
    except OSError as error:
        raise cannot_read(path, error) from error
    name = excerpt(path.stem)
    try:
        if path.suffix.lower() == ".znni":
            return NetworkFile(_within_limits(network_znni.parse(content, name)), None, path)
        parsed = network_yaml.parse(content, name)
        network = _within_limits(parsed.network)
        _check_field_of_view(network, parsed.field_of_view)
        return NetworkFile(network, path.parent / parsed.weights if parsed.weights else None, path)
    except NetworkFileError as error:
        raise error.with_context(str(path)) from None
    except ShapeError as error:
        raise NetworkFileError(f"{path}: {error}") from None


def _check_field_of_view(network: Network, said: Vec3 | None) -> None:
    """Raise NetworkFileError unless the file says nothing of the field of view, or what the layers give."""
    if said is None:
        return
    if network.why_not_sliding is not None:
        raise NetworkFileError(
            f"field_of_view is {text(said)}, but it is checked only for chains without padding, strides and skips; "
            "delete the line"
        )
    if said != network.field_of_view:
        raise NetworkFileError(
            f"field_of_view is {text(said)}, but the layers give {text(network.field_of_view)}; "
            "correct the layers, or delete the line"
        )


def _within_limits(network: Network) -> Network:
    if network.meaning == "sliding" and max(network.field_of_view) > LARGEST:
        raise NetworkFileError(
            f"the layers give a field of view of more than {LARGEST} voxels along an axis; correct kernels and windows"
        )
    return network


def _read_text(path: Path) -> str:
    content = read_regular(path, LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise NetworkFileError(
            f"{path} is larger than {LARGEST_FILE} bytes, so it is not a network file; give the file that "
            "lists the layers"
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise NetworkFileError(
            f"{path} is not text: byte 0x{content[error.start]:02x} at position {error.start} is not UTF-8; "
            "give the file that lists the layers, saved as UTF-8"
        ) from None
