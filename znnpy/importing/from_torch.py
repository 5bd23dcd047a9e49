"""Make a network of a PyTorch module, by exporting it as a graph at several sizes of the volume."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

from znnpy.errors import MissingExtraError, NetworkFileError
from znnpy.extras import install
from znnpy.importing.aten_program import walked
from znnpy.importing.finish import LARGEST_SIZE, LIKELY_SIZES, RefusedSizeError, Walk, Wishes, imported
from znnpy.importing.imported import Imported
from znnpy.messages import excerpt
from znnpy.shapes import Vec3, text

if TYPE_CHECKING:
    import torch


def imported_module(module: torch.nn.Module, example: Any, wishes: Wishes, name: str) -> Imported:
    """Return the network of a module in evaluation mode.

    example  an array as the module takes it, (1, channels, z, y, x) or (1, channels, y, x); None: found by trial

    NetworkFileError: the module does not export, or does what a network over a volume cannot; MissingExtraError without
    PyTorch.
    """
    try:
        import torch
    except ImportError:
        raise MissingExtraError(
            f"reading a module needs PyTorch, which is not installed; `{install('torch')}`"
        ) from None
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module is a torch.nn.Module, not {type(module).__name__}")
    training = [path or "the module itself" for path, part in module.named_modules() if part.training]
    if training:
        raise NetworkFileError(
            f"the module is in training mode ({excerpt(', '.join(training[:4]))}), in which norms and dropout compute "
            "something else; call module.eval() first"
        )
    shape = _shape_of(example) if example is not None else _found_shape(module)
    planar = len(shape) == 4

    def walk(size: Vec3) -> Walk:
        return walked(_exported(module, (1, shape[1], *(size[1:] if planar else size))), size)

    size: Vec3 = (1, shape[2], shape[3]) if planar else (shape[2], shape[3], shape[4])
    return imported(name, walk, size, wishes, f"PyTorch {torch.__version__}")


def _shape_of(example: Any) -> tuple[int, ...]:
    shape = tuple(int(n) for n in example.shape)
    if len(shape) not in (4, 5) or shape[0] != 1:
        raise NetworkFileError(
            f"the example has shape {shape}, but must be (1, channels, z, y, x), or (1, channels, y, x) for a network "
            "over images"
        )
    return shape


def _exported(module: torch.nn.Module, shape: tuple[int, ...]) -> Any:
    """Return the program of a module for an array of a shape."""
    import torch

    from znnpy.importing.torch_program import program_of

    like = next(chain(module.parameters(), module.buffers()), torch.empty(0))
    example = torch.zeros(shape, dtype=torch.float32, device=like.device)
    with (
        _silent(),
        warnings.catch_warnings(),
        torch.no_grad(),
    ):  # in which such blocks of a module make no graphs of their own
        warnings.simplefilter("ignore")  # of PyTorch about itself
        try:
            program = torch.export.export(module, (example,))
        except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError, AssertionError) as error:
            raise RefusedSizeError(
                f"torch.export cannot make a graph of {type(module).__name__} for an array of {text(shape)}: "
                f"{excerpt(_first_line(error))}; give an example that the module takes, and write control flow that "
                "depends on values without it"
            ) from error
    return program_of(program)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _found_shape(module: torch.nn.Module) -> tuple[int, ...]:
    """Return a shape that a module takes, found by running it on arrays without values."""
    refused: BaseException | None = None
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with _silent(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for shape in _shapes(module):
            try:
                module(torch.zeros(shape))
            except (
                RuntimeError,
                ValueError,
                TypeError,
                AttributeError,
                AssertionError,
                IndexError,
                NotImplementedError,
            ) as error:
                refused = refused or error
            else:
                return shape
    raise NetworkFileError(
        f"{type(module).__name__} takes no array of up to {LARGEST_SIZE} voxels along each axis: "
        f"{excerpt(_first_line(refused) if refused else 'it has no convolutions')}; give an example of its input"
    )


@contextmanager
def _silent() -> Iterator[None]:
    """Keep PyTorch from reporting shapes that do not suit, which are expected."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def _shapes(module: torch.nn.Module) -> Iterator[tuple[int, ...]]:
    """Yield shapes that a module may take: of the maps that its convolutions take, those of the first one first."""
    import torch

    found: Mapping[tuple[int, int], None] = dict.fromkeys(
        (part.in_channels, 2 if isinstance(part, torch.nn.Conv2d) else 3)
        for part in module.modules()
        if isinstance(part, torch.nn.Conv2d | torch.nn.Conv3d)
    )
    candidates = [*list(found)[:4], (1, 3), (1, 2)]
    for maps, dimensions in dict.fromkeys(candidates):
        for n in LIKELY_SIZES:
            yield (1, maps, *(n,) * dimensions)
    maps, dimensions = candidates[0]
    for n in range(16, LARGEST_SIZE):
        yield (1, maps, *(n,) * dimensions)
