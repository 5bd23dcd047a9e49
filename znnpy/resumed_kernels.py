"""Make a resumed run use the BLAS kernels that it began with. This module loads no numpy, which would choose them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from znnpy.errors import ResumeError, ZnnpyError
from znnpy.machine import processor
from znnpy.messages import option
from znnpy.network_files import read_ensemble
from znnpy.nnunet.names import label_path, model_of, unfinished
from znnpy.options import InferOptions
from znnpy.volume.journal import default_output, journal_path, read_header
from znnpy.volume.location import Location, volume_location

_X86 = (
    "Atom Barcelona Bobcat Bulldozer Cooperlake Core2 Dunnington Excavator Haswell Nano Nehalem Opteron Opteron_SSE3 "
    "Penryn Piledriver Prescott Sandybridge SapphireRapids SkylakeX Steamroller Zen"
)
_ARM = (
    "a64fx armv8 armv8sve armv9sme cortexa53 cortexa55 cortexa57 cortexa72 cortexa73 emag8180 falkor neoversen1 "
    "neoversen2 neoversev1 thunderx thunderx2t99 thunderx3t110 tsv110 vortex vortexm4"
)
OPENBLAS_KERNELS = frozenset(_X86.split() + _ARM.split())  # legal values of OPENBLAS_CORETYPE


def request_begun_kernels(asked: InferOptions, volume: str, out: str | None) -> None:
    """Make BLAS run the kernels of the run that is to be resumed, if there is one."""
    place = _begun_place(asked, volume, out)
    _request_same_kernels(_begun_here(place.path) if place.is_local else _begun_in_bucket(place))


def _request_same_kernels(begun: tuple[str, str] | None) -> None:
    """Make BLAS run the kernels that the run to be resumed began with: they decide the last bits of its output.

    On another processor none are requested, since kernels that it cannot run would kill the process; the run is refused
    later.

    begun  processor and BLAS kernels that the run began with; None if there is none
    """
    if begun is None or begun[0] != processor():
        return
    library, _, kernels = begun[1].partition(" ")
    if library == "openblas" and kernels in OPENBLAS_KERNELS:
        os.environ["OPENBLAS_CORETYPE"] = kernels


def _begun_place(asked: InferOptions, volume: str, out: str | None) -> Location:
    """Return the place of the output that the run to be resumed began."""
    if (model := model_of(asked.network)) is not None:
        return Location(str(unfinished(label_path(volume, out, model))))
    if out is not None:
        return Location.of(out)
    return Location(str(default_output(volume_location(volume), read_ensemble(asked.network).network.name)))


def _begun_in_bucket(place: Location) -> tuple[str, str] | None:
    """Return processor and BLAS kernels of the run that wrote to a bucket, read by another process.

    The package that reads buckets loads numpy, and this process must not before the kernels are requested.
    """
    program = "import sys; from znnpy.volume.bucket_journal import print_kernels; print_kernels(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", program, str(place)], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    return (lines[0], lines[1]) if done.returncode == 0 and len(lines) == 2 else None  # the run itself says what fails


def _begun_here(out: Path) -> tuple[str, str] | None:
    """Return processor and BLAS kernels of the run that wrote an output; None if there is none."""
    try:
        header = read_header(out)
    except ZnnpyError:  # some of them are OSErrors too
        raise
    except OSError as error:
        raise ResumeError(
            f"cannot read the journal {journal_path(out)}: {error.strerror}, so it is not known what is finished; "
            f"make it a readable file or move it away, or give another {option('out')}"
        ) from error
    return None if header is None else (header.settings["processor"], header.blas)
