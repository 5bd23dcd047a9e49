"""A small volume, a small network with weights, and the command line in this process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from click.testing import CliRunner, Result

from znnpy.cli import main
from znnpy.network import Layer, Network
from znnpy.volume.journal import header_digest, read_header
from znnpy.volume.store import JOURNAL_ATTRIBUTE


def entry_of(layer: Layer) -> dict[str, Any]:
    """Return a layer of a chain as network.yaml has it."""
    keys = ("type", "kernel", "out", "activation", "window", "of")
    return {
        key: list(value) if isinstance(value, tuple) else value for key, value in asdict(layer).items() if key in keys
    }


@dataclass(frozen=True)
class Place:
    """A folder with volume.h5 (20x23x25 uint8), net.yaml and net.npz, and the command line run on them."""

    folder: Path
    network: Network

    @classmethod
    def furnish(cls, folder: Path, network: Network) -> Place:
        """Write the three files."""
        place = cls(folder, network)
        rng = np.random.default_rng(7)
        place.write_volume(rng.integers(0, 256, (20, 23, 25), np.uint8))
        place.write_network()
        place.write_weights()
        return place

    @property
    def volume(self) -> Path:
        return self.folder / "volume.h5"

    @property
    def out(self) -> Path:
        return self.folder / "out.h5"

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of an `infer` that works."""
        return ["infer", str(self.volume), "--network", str(self.folder / "net.yaml"), "--out", str(self.out)]

    def run(self, *arguments: object) -> Result:
        return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)

    def infer(self, *arguments: object) -> Result:
        return self.run(*self.arguments, *arguments)

    def write_volume(self, array: np.ndarray[Any, Any], name: str = "volume.h5", **datasets: Any) -> Path:
        """Write an HDF5 file with `array` as dataset `raw`, and others by keyword."""
        path = self.folder / name
        with h5py.File(path, "w") as file:
            for dataset, voxels in {"raw": array, **datasets}.items():
                file.create_dataset(dataset, data=voxels)
        return path

    def write_network(self, name: str = "net.yaml", **changes: Any) -> Path:
        """Write the network's yaml, with entries replaced or added."""
        entries = {
            "name": self.network.name,
            "input_channels": self.network.input_channels,
            "normalise": {"mean": 120.0, "std": 40.0},
            "weights": "net.npz",
            "layers": [entry_of(layer) for layer in self.network.layers],
        }
        path = self.folder / name
        path.write_text(json.dumps({**entries, **changes}))  # YAML 1.2 holds JSON
        return path

    def write_weights(self, name: str = "net.npz", **changes: np.ndarray[Any, Any]) -> Path:
        """Write the network's weights, with arrays replaced or added."""
        from znnpy.formats.weights import random_weights

        arrays: dict[str, np.ndarray[Any, Any]] = {}
        for index, weights in enumerate(random_weights(self.network, seed=3)):
            arrays |= {f"conv{index}_weight": weights.weight, f"conv{index}_bias": weights.bias}
        path = self.folder / name
        save: Any = np.savez  # its keywords are arrays, whatever the stubs say
        save(path, **{**arrays, **changes})
        return path

    def write_small_volume(self) -> None:
        """Replace the volume by a small one: that nothing fits shows sooner with few shapes of patches."""
        self.write_volume(np.random.default_rng(7).integers(0, 256, (7, 11, 9), np.uint8))

    def refusal(self, *arguments: object, code: int = 1) -> str:
        """Return the sentence on stderr that a refused command prints; check that nothing changed."""
        before = self.state()
        result = self.run(*arguments)
        assert result.exit_code == code, (result.exit_code, result.output, result.exception)
        assert self.state() == before
        (line,) = (line for line in result.stderr.strip().splitlines() if not line.startswith("warning: "))
        assert line.startswith("Error: ")
        sentence = line.removeprefix("Error: ")
        if "--json" in arguments:
            assert json.loads(result.stdout) == {"error": sentence}
        else:
            assert result.stdout == ""
        return sentence

    def state(self) -> dict[str, str]:
        """Return the content of every file in the folder, to see that nothing was damaged."""
        files = sorted(path for path in self.folder.iterdir() if path.is_file())
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    def prediction(self) -> np.ndarray[Any, Any]:
        with h5py.File(self.out) as file:
            return np.array(file["prediction"])

    def edit_journal(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Change the header of an unfinished run's journal, and what the output says of it, as if it began so."""
        journal = self.out.with_name(f"{self.out.name}.journal")
        first, second, rest = journal.read_text().split("\n", 2)
        header = json.loads(second)
        change(header)
        journal.write_text("\n".join((first, json.dumps(header), rest)))
        changed = read_header(self.out)
        assert changed is not None
        with h5py.File(self.out.with_name(f"{self.out.name}.partial"), "r+") as file:
            file["prediction"].attrs.modify(JOURNAL_ATTRIBUTE, header_digest(changed))
