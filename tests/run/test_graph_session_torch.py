"""Graphs give what PyTorch gives for the padded volume, by the definition and in patches and columns."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.support.graph_runs import assert_equal, ran, reference, some_plan, some_region
from tests.support.seeded_graphs import case

pytestmark = pytest.mark.torch

ROUNDING = 1e-9  # of the largest value: both compute in float64


@pytest.mark.parametrize("seed", range(1000, 1090))
def test_random_graphs_equal_pytorch(seed: int) -> None:
    from tests.support.torch_graphs import grown_in_torch, in_torch

    one, rng = case(seed), random.Random(seed)
    network = one.network
    image = one.volume.transpose(1, 2, 3, 0)
    z, y, x = (a - b for a, b in zip(one.geometry.volume, one.size, strict=True))
    grown = grown_in_torch(image, (z, y, x), network.pad_to_period)
    if network.normalise is not None:
        grown = (grown - np.array(network.normalise.mean)) / np.array(network.normalise.std)
    exact = in_torch(network, one.weights, grown)
    defined = reference(one)
    assert defined.shape == exact.shape, one
    assert np.abs(defined - exact).max() <= ROUNDING * max(1.0, np.abs(exact).max()), one
    region = some_region(one.geometry.size(network.outputs[0]), rng)
    plan = some_plan(one, region, rng)
    assert_equal(ran(plan, one).out, exact[(slice(None), *region.slices)], one)
