"""A U-Net of two levels that is computed in a moment, with its files."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np

from znnpy.formats.networks import read_network
from znnpy.network import Network

YAML = """
format: 2
name: small_unet
input: {channels: 1}
normalise: {mean: [127.5], std: [50.0]}
layers:
  - {conv: [3, 3, 3], out: 4, padding: [1, 1, 1], name: enter}
  - {batch_norm: {}, name: enter_norm}
  - {activation: relu, name: enter_relu}
  - {pool: [1, 2, 2], name: down}
  - {conv: [3, 3, 3], out: 6, padding: [1, 1, 1], activation: relu, name: deep}
  - {upsample: [1, 2, 2], name: up}
  - {concat: {}, name: join, inputs: [enter_relu, up]}
  - {conv: [3, 3, 3], out: 2, padding: [1, 1, 1], activation: sigmoid, name: leave}
"""
