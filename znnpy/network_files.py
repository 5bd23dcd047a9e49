"""Read networks from `network.yaml`, ZNNi's `.znni`, files of ONNX and PyTorch, and from the package itself.

Every mistake in a file is a NetworkFileError of one sentence: where it is, what was read, what is accepted, what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from znnpy.errors import NetworkFileError, ShapeError
from znnpy.files import read_regular
from znnpy.formats import network_yaml, network_znni
from znnpy.formats.files import LARGEST, cannot_read, require_file
from znnpy.importing.recognised import description_in, is_described
from znnpy.messages import excerpt, option
from znnpy.network import ConvWeights, Network
from znnpy.nnunet.names import model_of
from znnpy.option_values import Meaning
from znnpy.shapes import Vec3, text
from znnpy.windows.settings import Windows

if TYPE_CHECKING:
    from znnpy.importing.finish import Wishes
    from znnpy.importing.imported import Imported
    from znnpy.shared_options import WindowOptions

DEFAULT = "fib25_boundary"
SHIPPED = Path(__file__).parent / "networks"  # real files, not importlib.resources: numpy and safetensors need them

SUFFIXES = (".yaml", ".yml", ".znni", ".onnx", ".pt2")
IMPORTED = (".onnx", ".pt2")  # files that hold layers and weights of another framework
RENAME = "is an exported program, whose name ends in .pt2; rename it"
FOREIGN = (".pt", ".pth", ".ckpt", ".torchscript")  # of PyTorch: to read what they hold may run any code
LARGEST_FILE = 2**18  # bytes; the largest network that is allowed is smaller


class Trained(Protocol):
    """A network with its weights, as `load_network` and `from_torch` give it."""

    @property
    def network(self) -> Network: ...

    @property
    def weights(self) -> tuple[ConvWeights, ...]: ...


@dataclass(frozen=True)
class NetworkFile:
    """A network, the weights file that it names (`plan` does not need it to exist), and the file it was read from.

    path     None: it was given with its weights, and not read
    held     weights that came with it, in the order of the layers
    members  the networks of an ensemble, which have equal layers
    """

    network: Network
    weights: Path | None
    path: Path | None
    held: tuple[ConvWeights, ...] | None = None
    members: tuple[NetworkFile, ...] = ()

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files of all members that were read."""
        return tuple(one.path for one in (self.members or (self,)) if one.path is not None)


def shipped() -> tuple[str, ...]:
    """Return the names of the networks in the package; `read_network` takes them in place of a path."""
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.yaml")))


def read_network(where: str | Path | Trained, meaning: Meaning | None = None) -> NetworkFile:
    """Read a network file, or the network of the package that `where` names; or take one with its weights as it is.

    meaning  meaning over a volume; None: the one that the file names, or the usual one of such a network

    NetworkFileError for whatever is wrong with the file; ShapeError if the network does not have that meaning.
    """
    file = _read(where) if isinstance(where, str | Path) else NetworkFile(where.network, None, None, where.weights)
    return file if meaning is None else replace(file, network=replace(file.network, asked_meaning=meaning))


def read_ensemble(
    where: str | Path | Trained | Sequence[str | Path | Trained], meaning: Meaning | None = None
) -> NetworkFile:
    """Return what `read_network` does, or several networks with equal layers as one.

    NetworkFileError if their layers differ.
    """
    if isinstance(where, str | Path) or not isinstance(where, Sequence):
        return read_network(where, meaning)
    if len(where) > 1:
        model_of(where)  # refuses a model among others
    files = tuple(read_network(one, meaning) for one in where)
    if not files:
        raise NetworkFileError("no network is given; give one, or several with equal layers")
    first = files[0]
    for other in files[1:]:
        if other.network.sha256 != first.network.sha256:
            raise NetworkFileError(
                f"{other.path or other.network.name} has other layers than {first.path or first.network.name}, and the "
                "networks of an ensemble differ in their weights alone; give networks with equal layers"
            )
    if len(files) == 1:
        return first
    return replace(first, network=replace(first.network, members=len(files)), members=files)


def read_asked(where: str | Path | Trained | Sequence[str | Path | Trained], asked: WindowOptions) -> NetworkFile:
    """Return what `read_ensemble` does, with the windows and the result that options ask for.

    ShapeError if the network has no such result, if an option of another result is given, or if options of windows are
    given and it is not computed in windows.
    """
    asked.check_result()
    file = read_ensemble(where, "windows" if asked.meaning is None and asked.window is not None else asked.meaning)
    network = file.network
    windows = _windows(network, asked) if network.meaning == "windows" else None
    if windows is None and (given := _window_options(asked)):
        instead = f"give {option('window')}" if asked.meaning is None else option("meaning", asked.meaning)
        raise ShapeError(
            f"{network.name} is computed {network.meaning}, and not in windows: leave out {' and '.join(given)}, or "
            f"{instead}"
        )
    if network.members > 1 and windows is None:
        raise ShapeError(
            f"{network.members} networks are an ensemble, and {network.name} is computed {network.meaning}; give "
            f"{option('window')}, since ensembles are computed in windows, or one network"
        )
    asked.result.check([network.maps[tensor] for tensor in network.outputs])
    if asked.output != "maps" and windows is None:
        raise ShapeError(
            f"{option('output', asked.output)} is made of the blended results of windows, and {network.name} is "
            f"computed {network.meaning}; give {option('window')}, or leave it out"
        )
    return replace(file, network=replace(network, windows=windows, result=asked.result))


def _windows(network: Network, asked: WindowOptions) -> Windows:
    """Return the windows of a network, changed as options say."""
    size = asked.window or (None if network.windows is None else network.windows.size)
    if size is None:
        raise ShapeError(
            f"{network.name} is computed in windows, and their size is not known; give {option('window')}, such as "
            f"{option('window', (128, 128, 128))}: that with which the network was trained"
        )
    z, y, x = map(int, size)
    changed: dict[str, Any] = {"size": (z, y, x)}
    if asked.overlap is not None:
        overlap = tuple(asked.overlap) if isinstance(asked.overlap, Sequence) else (asked.overlap,)
        changed["overlap"] = tuple(map(float, overlap * (3 // len(overlap))))
    if asked.mirror is not None:
        changed["mirror"] = tuple(axis for axis, name in enumerate("zyx") if name in asked.mirror.split(","))
    given = {"blend": asked.blend, "sigma": asked.sigma, "rule": asked.windows_like}
    changed |= {key: value for key, value in given.items() if value is not None}
    windows = Windows(**changed) if network.windows is None else replace(network.windows, **changed)
    if asked.sigma is not None and windows.blend != "gaussian":
        raise ShapeError(f"{option('sigma')} is of Gaussian weights, and weights are {windows.blend}; leave it out")
    return windows


def _window_options(asked: WindowOptions) -> list[str]:
    """Name the options of windows that are given."""
    words = ("window", "overlap", "blend", "sigma", "mirror", "windows_like")
    return [option(word) for word in words if getattr(asked, word) is not None]


def read_model(path: Path, wishes: Wishes, name: str | None = None) -> Imported:
    """Read a network file of another framework, .onnx or .pt2, or a model description of bioimage.io.

    wishes  what the file does not say; name: of the network, None: that of the file

    NetworkFileError for whatever is wrong with the file; MissingExtraError if a package is missing.
    """
    from znnpy.importing.files import imported_file  # the readers take memory and time, which others do not pay
    from znnpy.importing.torch_files import why_not_pt2

    try:
        if path.suffix.lower() in FOREIGN and path.is_file():
            raise NetworkFileError(f"{path} {why_not_pt2(path) or RENAME}")
        _refuse_zip(path)
        if not is_described(path):
            require_file(path, "model", IMPORTED)
        return imported_file(path, wishes, name)
    except OSError as error:
        raise cannot_read(path, error) from error


def _read(where: str | Path) -> NetworkFile:
    if (named := model_of(where)) is not None:
        from znnpy.nnunet import folder

        model = folder.read_model(named.folder, named.folds, named.checkpoint)
        return NetworkFile(model.network, None, named.folder / "plans.json", model.weights)
    path = Path(where)
    try:
        if not path.is_file() and str(where) in shipped():
            path = SHIPPED / f"{where}.yaml"
        _refuse_zip(path)
        if path.is_dir():
            path = description_in(path) or path
        if (path.suffix.lower() in (*IMPORTED, *FOREIGN) and path.is_file()) or is_described(path):
            from znnpy.importing.finish import Wishes

            made = read_model(path, Wishes())
            return NetworkFile(made.network, None, path, made.weights)
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


def _refuse_zip(path: Path) -> None:
    if path.suffix.lower() == ".zip" and path.is_file():
        raise NetworkFileError(
            f"{path} is an archive, and files are read where they are; unpack it with `unzip`, and give the folder or "
            "the rdf.yaml in it"
        )


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
