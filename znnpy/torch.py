"""Modules of PyTorch that znnpy computes: `Dense` stands in for a module inside of another one."""

from __future__ import annotations

import hashlib
import threading
import weakref
from contextlib import ExitStack
from typing import Any

import numpy as np

from znnpy.array_session import ArraySession
from znnpy.errors import MissingExtraError, VolumeError
from znnpy.extras import install
from znnpy.options import SessionOptions
from znnpy.torch_modules import CompiledModule, compile
from znnpy.wiring import PadToPeriod

try:
    import torch
except ImportError:
    raise MissingExtraError(f"znnpy.torch needs PyTorch; `{install('torch')}`") from None

SESSION_BYTES = np.dtype(np.float32).itemsize  # of a voxel that a session has memory for


class Dense(torch.nn.Module):  # type: ignore[misc]
    """A module that gives what another one gives, computed by znnpy: `znnpy.compile` for use inside of a module.

        model.backbone = Dense(model.backbone.eval(), ram="16G")

    module         as `znnpy.from_torch` takes it, and `example`; it is the submodule `module`, whose weights stay where
                   they are. It is read anew when they have other values.
    pad_to_period  as for `znnpy.compile`
    options        of `TrainedNetwork.session`, such as ram="16G", threads=8, window=(64, 64, 64), output="labels"

    The first tensor of each shape is planned for and prepared; this stays in memory until `close`. The result has no
    gradient. Copies and pickles plan anew.

    NetworkFileError for a module that cannot be read, also if it was set to training mode; TypeError for an option that
    sessions do not have.
    """

    def __init__(
        self, module: torch.nn.Module, example: Any = None, *, pad_to_period: PadToPeriod = "refuse", **options: Any
    ) -> None:
        super().__init__()
        self.module = module
        self.example = None if example is None else torch.empty(tuple(example.shape), device="meta")
        self.runner = ModuleRunner(pad_to_period, options)
        self.runner.read(module, self.example)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, volume: torch.Tensor) -> Any:
        """Return what the module gives for a tensor.

        volume  as the module takes it, or without its first axes, (channels, z, y, x) or (z, y, x): floating point,
                which is computed in float32, or integers of at most 32 bits

        Returns tensors on the device of `volume`, of its type where that is floating point, and else float32; uint8 of
        labels.

        VolumeError for other tensors, ShapeError and NoPlanError as from a session.
        """
        return self.runner(self.module, volume, self.example)

    def close(self) -> None:
        """Give back what was prepared; the next tensor prepares it again."""
        self.runner.close()


class ModuleRunner:
    """Computes modules: each is read when its values are new, and computed in a session that stays open.

    Any thread may call it; calls run one after the other.
    """

    def __init__(self, pad_to_period: PadToPeriod, options: dict[str, Any]) -> None:
        SessionOptions(dtype="float32", **options)  # what a session does not take is refused here
        self._pad_to_period, self._options = pad_to_period, options
        self._known: tuple[object, CompiledModule] | None = None  # state of the module, and what was read of it
        self._open: tuple[CompiledModule, dict[str, Any], ArraySession] | None = None
        self._turn = threading.RLock()
        self._leave = weakref.finalize(self, lambda: None)  # leaves the session that is open

    def read(self, module: torch.nn.Module, example: Any = None) -> CompiledModule:
        """Return a module as znnpy computes it, read anew if its values, or the mode of a part, are others."""
        state = _digest(module), tuple(part.training for part in module.modules())
        with self._turn:
            if self._known is None or self._known[0] != state:
                self._known = state, compile(module, example, pad_to_period=self._pad_to_period)
            return self._known[1]

    def __call__(self, module: torch.nn.Module, volume: torch.Tensor, example: Any = None, **more: Any) -> Any:
        """Return what a module gives for a tensor.

        example  a tensor that the module takes, for reading it
        more     options of the session beside those of the runner
        """
        if not isinstance(volume, torch.Tensor):
            raise TypeError(f"the volume is a tensor, and not {type(volume).__name__}; make one with torch.as_tensor")
        floats = volume.is_floating_point()
        if volume.is_complex() or not (floats or volume.element_size() <= SESSION_BYTES):
            raise VolumeError(f"the tensor is {volume.dtype}; give floating point, or integers of at most 32 bits")
        plain = volume.detach().as_subclass(torch.Tensor)
        given = np.from_dlpack(plain.to("cpu", torch.float32 if floats else plain.dtype))
        with self._turn:
            compiled = self.read(module, example)
            found = compiled.outputs(given, self._session(compiled, {**self._options, **more}))
        tensors = (torch.from_dlpack(one) for one in found)
        return compiled.named([self._like(one, volume) for one in tensors])

    @staticmethod
    def _like(result: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Return a result on the device of a tensor, and of its type where both are floating point."""
        both = result.is_floating_point() and given.is_floating_point()
        return result.to(given.device, given.dtype if both else result.dtype)

    def _session(self, compiled: CompiledModule, options: dict[str, Any]) -> ArraySession:
        """Return the session with these options, which stays open until another one is wanted."""
        if self._open is None or self._open[0] is not compiled or self._open[1] != options:
            self.close()
            with ExitStack() as stack:
                session = stack.enter_context(compiled.network.session(dtype="float32", **options))
                self._leave = weakref.finalize(self, stack.pop_all().close)
            self._open = compiled, options, session
        return self._open[2]

    def close(self) -> None:
        """Give back what was prepared."""
        with self._turn:
            self._open = None
            self._leave()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs: it shares no session and no lock."""
        return {"_pad_to_period": self._pad_to_period, "_options": self._options, "_known": self._known}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_pad_to_period"], state["_options"])  # type: ignore[misc]
        self._known = state["_known"]


def _digest(module: torch.nn.Module) -> str:
    """Return a digest of the values of all parameters and buffers, which may change in many ways."""
    found = hashlib.sha256()
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        array = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        found.update(array)
    return found.hexdigest()
