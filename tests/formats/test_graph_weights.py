"""Weights of graphs: arrays by the names of nodes, batch norms, and what is refused; random ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.formats.test_weights import refusal, save_npz, save_safetensors
from znnpy.formats.weights import random_weights, read_weights, sha256
from znnpy.formats.wiring import Given, network_of
from znnpy.kernels.whole import whole
from znnpy.layers import Activate, Add, Concat, Conv, ConvTranspose, Layer, Norm, Scale
from znnpy.network import Network, Pool

Arrays = dict[str, npt.NDArray[Any]]
NETWORK = network_of(
    "net",
    2,
    [
        Given(Conv((1, 2, 3), 4, groups=2), "enc.0"),
        Given(Scale(epsilon=0.5, type="batch_norm"), "norm"),
        Given(Activate("prelu"), "slope"),
        Given(ConvTranspose((1, 2, 3), 6, groups=2), "up"),
        Given(Scale(), "scale"),
        Given(Conv((1, 1, 1), 3), "head"),
    ],
)
SHAPES = {
    "enc.0.weight": (4, 1, 1, 2, 3), "enc.0.bias": (4,),
    "norm.weight": (4,), "norm.bias": (4,), "norm.running_mean": (4,), "norm.running_var": (4,),
    "slope.weight": (1,),
    "up.weight": (4, 3, 1, 2, 3), "up.bias": (6,),
    "scale.weight": (6,), "scale.bias": (6,),
    "head.weight": (3, 6, 1, 1, 1), "head.bias": (3,),
}  # fmt: skip


@pytest.fixture
def arrays() -> Arrays:
    rng = np.random.default_rng(1)
    return {name: rng.uniform(0.5, 2, shape).astype(np.float32) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("save", [save_npz, save_safetensors])
def test_arrays_are_read_by_the_names_of_nodes(save: Any, arrays: Arrays, tmp_path: Path) -> None:
    arrays["norm.num_batches_tracked"] = np.array(7)
    path = save(tmp_path / ("w.npz" if save is save_npz else "w.safetensors"), arrays)
    read = dict(zip((NETWORK.names[index] for index in NETWORK.weighted), read_weights(path, NETWORK), strict=True))
    assert list(read) == ["enc.0", "norm", "slope", "up", "scale", "head"]
    for name in ("enc.0", "up", "scale", "head"):
        np.testing.assert_array_equal(read[name].weight, arrays[f"{name}.weight"])
        np.testing.assert_array_equal(read[name].bias, arrays[f"{name}.bias"])
    np.testing.assert_array_equal(read["slope"].weight, arrays["slope.weight"])
    assert read["slope"].bias.shape == (0,)


def test_batch_norm_is_folded_in_float64(arrays: Arrays, tmp_path: Path) -> None:
    arrays["norm.running_mean"] = np.full(4, 1e4, np.float32)  # the difference of large values loses digits in float32
    folded = read_weights(save_npz(tmp_path / "w.npz", arrays), NETWORK)[1]
    weight, bias, mean, variance = (
        arrays[f"norm.{part}"].astype(np.float64) for part in ("weight", "bias", "running_mean", "running_var")
    )
    scale = weight / np.sqrt(variance + 0.5)
    assert folded.weight.dtype == folded.bias.dtype == np.float32
    np.testing.assert_array_equal(folded.weight, scale.astype(np.float32))
    np.testing.assert_array_equal(folded.bias, (bias - mean * scale).astype(np.float32))


def test_convolutions_without_a_bias_have_zeros(arrays: Arrays, tmp_path: Path) -> None:
    del arrays["enc.0.bias"], arrays["up.bias"]
    read = read_weights(save_npz(tmp_path / "w.npz", arrays), NETWORK)
    np.testing.assert_array_equal(read[0].bias, np.zeros(4, np.float32))
    np.testing.assert_array_equal(read[3].bias, np.zeros(6, np.float32))


def test_prelu_may_have_a_slope_for_each_map(arrays: Arrays, tmp_path: Path) -> None:
    arrays["slope.weight"] = np.arange(4, dtype=np.float32)
    assert read_weights(save_npz(tmp_path / "w.npz", arrays), NETWORK)[2].weight.shape == (4,)
    arrays["slope.weight"] = np.arange(3, dtype=np.float32)
    assert refusal(save_npz(tmp_path / "w.npz", arrays), NETWORK) == (
        "node slope (prelu): slope.weight has shape (3,), but must be (1,) or (4,) (1,) or (maps,); save it so, or "
        "give the weights of this network"
    )


MISSING = [
    ("enc.0.weight", "node enc.0 (conv 1x2x3 -> 4 none groups 2): enc.0.weight is missing, expected (4, 1, 1, 2, 3) "
     "(out, in / groups, kz, ky, kx) float32"),
    ("up.weight", "node up (conv_transpose 1x2x3 -> 6 none groups 2): up.weight is missing, expected (4, 3, 1, 2, 3) "
     "(in, out / groups, kz, ky, kx) float32"),
    ("norm.running_var", "node norm (batch_norm none): norm.running_var is missing, expected (4,) (maps,) float32"),
    ("scale.bias", "node scale (scale none): scale.bias is missing, expected (6,) (maps,) float32"),
    ("slope.weight", "node slope (prelu): slope.weight is missing, expected (1,) or (4,) (1,) or (maps,) float32"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "message"), MISSING)
def test_missing_array_names_its_node(name: str, message: str, arrays: Arrays, tmp_path: Path) -> None:
    del arrays[name]
    refused = refusal(save_npz(tmp_path / "w.npz", arrays), NETWORK)
    assert refused.startswith(f"{message}; the file holds ")
    assert refused.endswith("; save the array by that name")


def test_arrays_of_no_node_are_refused(arrays: Arrays, tmp_path: Path) -> None:
    arrays["conv0_weight"] = arrays["enc.0.weight"]
    refused = refusal(save_npz(tmp_path / "w.npz", arrays), NETWORK)
    assert refused.startswith("no node takes conv0_weight: the network net needs enc.0.weight, enc.0.bias, ")


def test_transposed_kernel_has_its_own_order(arrays: Arrays, tmp_path: Path) -> None:
    arrays["up.weight"] = arrays["up.weight"].swapaxes(0, 1)
    assert "up.weight has shape (3, 4, 1, 2, 3), but must be (4, 3, 1, 2, 3) (in, out / groups, kz, ky, kx)" in refusal(
        save_npz(tmp_path / "w.npz", arrays), NETWORK
    )


def test_variances_that_cannot_be_are_refused(arrays: Arrays, tmp_path: Path) -> None:
    arrays["norm.running_var"][2] = -0.25
    assert refusal(save_npz(tmp_path / "w.npz", arrays), NETWORK) == (
        "node norm (batch_norm none): running_var is -0.25 at (2,), and a variance is never negative; train or save "
        "the network again"
    )
    arrays["norm.running_var"][2] = 0.25
    arrays["norm.running_mean"][1] = 3e38
    arrays["norm.weight"][1] = 100
    refused = refusal(save_npz(tmp_path / "w.npz", arrays), NETWORK)
    assert refused.startswith(
        "node norm (batch_norm none): the offset of map 1 is not finite in float32: weight 100, running_mean 3e+38, "
    )


def test_affine_norm_has_a_factor_and_an_offset_for_each_map(tmp_path: Path) -> None:
    arrays = {"n.weight": np.array([2.0, 3.0]), "n.bias": np.array([4.0, 5.0]), "c.weight": np.ones((1, 2, 1, 1, 1))}
    file = save_npz(tmp_path / "w.npz", arrays)
    for affine in (True, False):
        norm = Norm("instance_norm", affine=affine)
        network = network_of("net", 2, [Given(norm, "n"), Given(Conv((1, 1, 1), 1), "c")])
        if affine:
            first, _ = read_weights(file, network)
            assert (first.weight.tolist(), first.bias.tolist()) == ([2, 3], [4, 5])
            assert network.parameters == 7
        else:
            assert refusal(file, network).startswith("no node takes n.weight, n.bias: ")


def test_random_weights_of_a_graph_keep_the_scale_of_values() -> None:
    blocks: list[Given] = []
    for index in range(4):
        before = f"end{index - 1}" if index else "stem"
        blocks += [
            Given(Conv((3, 3, 3), 8, padding=((1,) * 3,) * 2), f"conv{index}", (before,)),
            Given(Scale("relu", epsilon=1e-5, type="batch_norm"), f"norm{index}"),
            Given(ConvTranspose((2, 2, 2), 8, (2, 2, 2)), f"up{index}"),
            Given(Activate("prelu"), f"slope{index}"),
            Given(Pool((2, 2, 2)), f"end{index}"),
        ]
    network = network_of("deep", 1, [Given(Conv((1, 1, 1), 8, "relu"), "stem"), *blocks])
    weights = random_weights(network, seed=5)
    (out,) = whole(network, weights, np.random.default_rng(2).normal(size=(6, 6, 6, 1)))
    assert 0.05 < np.sqrt(np.mean(out**2)) < 100  # of which the maxima of poolings add some
    assert all(np.isfinite(one.weight).all() and one.weight.dtype == np.float32 for one in weights)
    assert sha256(weights) == sha256(random_weights(network, seed=5)) != sha256(random_weights(network, seed=6))


def test_random_weights_of_chains_are_what_they_were() -> None:
    """Names do not change them."""
    layers: tuple[Layer, ...] = (Conv((3, 2, 1), 4, "relu"), Pool((2, 2, 2)), Conv((2, 2, 2), 3))
    chain = Network("chain", 2, layers)
    digest = "123674cba6cc0420367b9ceebb5396615e82ad3f379f3f79937774814f35642b"
    assert sha256(random_weights(chain, seed=3)) == digest
    named = network_of("chain", 2, [Given(layer, f"n{index}") for index, layer in enumerate(layers)])
    assert sha256(random_weights(named, seed=3)) == digest


def test_join_of_two_readers_needs_no_weights(tmp_path: Path) -> None:
    network = network_of("net", 1, [Given(Concat(), "cat", ("input", "input")), Given(Add(), "sum", ("cat", "cat"))])
    assert read_weights(save_npz(tmp_path / "w.npz", {}), network) == ()
