"""Find the devices that the options of a caller ask for."""

from __future__ import annotations

from dataclasses import dataclass

from znnpy.messages import option
from znnpy.option_values import OFFLOAD_MODES, Device
from znnpy.shapes import Precision
from znnpy.shared_options import PlanningOptions


@dataclass(frozen=True, slots=True)
class AskedDevices:
    """The devices that a caller means.

    gpus  how many GPUs compute together, if GPUs do; None: all that are there
    """

    device: Device = "auto"
    gpus: int | None = 1
    vram: int | str | None = None
    precision: Precision | None = None

    @property
    def needs_gpu(self) -> bool:
        """Return whether there has to be a plan for a GPU: who says how many, or how much of its memory, wants one."""
        return self.device == "gpu" or self.vram is not None or self.gpus != 1


def devices_asked(asked: PlanningOptions) -> AskedDevices:
    """Return the devices that options mean; ValueError for conflicting options."""
    mode, device = asked.mode, asked.device
    if mode != "auto":
        device = "cpu" if mode == "cpu" else "gpu"
        if asked.device not in ("auto", device):
            raise ValueError(
                f"{option('mode', mode)} is of the {device.upper()}, and {option('device', asked.device)} was asked "
                "for: drop one"
            )
    two = mode in (*OFFLOAD_MODES, "side-by-side")  # then primitives of the CPU do not say that it is meant
    names = [name for name in asked.names if not two or name.startswith("gpu.")]
    kinds = {name.partition(".")[0] for name in names}
    if len(kinds) == 1:
        meant: Device = "gpu" if kinds == {"gpu"} else "cpu"
        if device not in ("auto", meant):
            raise ValueError(
                f"{option('only')} {' and '.join(names)} is of the {meant.upper()}, "
                f"and {option('device', device)} was asked for: drop one"
            )
        device = meant
    if device == "cpu" and asked.vram is not None:
        raise ValueError(f"{option('vram')} limits the memory of a GPU, and none is used: drop it")
    gpus = _gpus_asked(asked.gpus, device)
    if mode in OFFLOAD_MODES and gpus != 1:
        raise ValueError(
            f"{option('mode', mode)} runs on one GPU: leave out {option('gpus')}, or choose {option('mode', 'gpu')}"
        )
    return AskedDevices(device, gpus, asked.vram, asked.precision)


def _gpus_asked(gpus: int | str | None, device: Device) -> int | None:
    """Return how many GPUs compute, None for "all"; ValueError for what is no number of GPUs."""
    if gpus is None:
        return 1
    if device == "cpu":
        raise ValueError(
            f"{option('gpus')} are for runs on GPUs, and {option('device', 'cpu')} was asked for: drop one"
        )
    if gpus == "all":
        return None
    count = int(gpus) if isinstance(gpus, int) or gpus.isdecimal() else 0
    if count < 1:
        raise ValueError(f"{gpus!r} is no number of GPUs: give 1 or more, or all")
    return count
