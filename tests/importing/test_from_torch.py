"""`from_torch` and `compile` take modules as people have them; they give what PyTorch gives, or say what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import znnpy
from znnpy.errors import NetworkFileError, ShapeError, VolumeError

pytestmark = pytest.mark.torch

ROUNDING = 1e-5  # of the largest value


def module(make: Callable[[Any], None], forward: Callable[..., Any]) -> Any:
    """Return a module in evaluation mode whose parts are made by `make`."""
    import torch

    class Net(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            make(self)

        def forward(self, x: Any) -> Any:
            return forward(self, x)

    torch.manual_seed(3)
    return Net().eval()


def chain(*parts: Any) -> Any:
    import torch

    return torch.nn.Sequential(*parts).eval()


def conv(maps: int = 1, out: int = 3, kernel: int = 3, **options: Any) -> Any:
    import torch

    torch.manual_seed(maps + 10 * out)
    return torch.nn.Conv3d(maps, out, kernel, **{"padding": kernel // 2, **options})


def image(*shape: int) -> Any:
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def fast(net: Any, example: Any = None, **options: Any) -> Any:
    return znnpy.compile(net, example, threads=1, ram="4G", calibrate=False, **options)


def given_by(net: Any, x: Any) -> Any:
    import torch

    with torch.no_grad():
        return net(x)


def assert_close(found: Any, exact: Any) -> None:
    found, exact = np.asarray(found), np.asarray(exact)
    assert found.shape == exact.shape
    assert np.abs(found - exact).max() <= ROUNDING * np.abs(exact).max()


def assert_same(net: Any, *, maps: int = 1, size: tuple[int, ...] = (8, 10, 12)) -> None:
    """Fail unless the compiled module gives what the module does."""
    x = image(1, maps, *size)
    assert_close(fast(net)(x), given_by(net, x))


def refused(net: Any, *words: str, example: Any = None) -> None:
    with pytest.raises(NetworkFileError) as caught:
        znnpy.from_torch(net, example)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} in {caught.value}"


def unet() -> Any:
    """Return a small U-Net: one level, joined by concatenation."""
    import torch

    def make(net: Any) -> None:
        net.first, net.deep, net.last = conv(1, 4), conv(4, 4), conv(8, 2)
        net.up = torch.nn.ConvTranspose3d(4, 4, 2, stride=2)

    def forward(net: Any, x: Any) -> Any:
        skip = net.first(x).relu()
        deep = net.deep(torch.nn.functional.max_pool3d(skip, 2)).relu()
        return net.last(torch.cat([skip, net.up(deep)], 1))

    return module(make, forward)


# --- what goes in, and what comes out ---


def test_batch_of_tensors_gives_a_tensor_of_the_batch() -> None:
    import torch

    net = unet()
    x = image(3, 1, 8, 6, 10)
    found = fast(net)(x)
    assert isinstance(found, torch.Tensor)
    assert found.dtype == torch.float32
    assert_close(found, given_by(net, x))


def test_tensor_that_is_part_of_a_graph_of_gradients_is_taken() -> None:
    net = unet()
    x = image(1, 1, 8, 8, 8).requires_grad_()
    found = fast(net)(x)
    assert not found.requires_grad
    assert_close(found, given_by(net, x))


@pytest.mark.parametrize("dimensions", [3, 4, 5])
def test_numpy_arrays_of_fewer_dimensions_are_taken(dimensions: int) -> None:
    net = unet()
    x = image(1, 1, 8, 6, 10)
    given = x.numpy()[(0,) * (5 - dimensions)]
    found = fast(net)(given)
    assert isinstance(found, np.ndarray)
    assert_close(found, given_by(net, x).numpy()[(0,) * (dimensions != 5)])


def test_zarr_array_is_taken(tmp_path: Any) -> None:
    import zarr

    net = unet()
    x = image(1, 1, 8, 6, 10)
    stored = zarr.create_array(tmp_path / "volume.zarr", shape=(8, 6, 10), chunks=(4, 4, 4), dtype="float32")
    stored[:] = x.numpy()[0, 0]
    assert_close(fast(net)(stored), given_by(net, x)[0])


def test_volume_of_odd_size_is_padded_and_the_output_is_cut() -> None:
    import torch

    net = unet()
    x = image(1, 1, 7, 9, 11)
    padded = torch.nn.functional.pad(x, (0, 1, 0, 1, 0, 1), mode="reflect")
    assert_close(fast(net, pad_to_period="reflect")(x), given_by(net, padded)[:, :, :7, :9, :11])


def test_volume_of_odd_size_is_refused_unless_it_may_be_padded() -> None:
    """A module that upsamples to the size of a skip connection takes it, and gives other values for it."""
    with pytest.raises(ShapeError) as caught:
        fast(unet())(image(1, 1, 7, 9, 11))
    assert "7x9x11" in str(caught.value)
    assert "8x10x12" in str(caught.value)


def test_nested_outputs_are_refused() -> None:
    import torch

    class Nested(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv3d(1, 2, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
            y = self.conv(x)
            return y, [y.relu(), y.sigmoid()]

    with pytest.raises(NetworkFileError, match="nested outputs"):
        fast(Nested().eval())


def test_images_are_planes() -> None:
    import torch

    net = chain(torch.nn.Conv2d(2, 3, 3, padding=1), torch.nn.Sigmoid())
    x = image(4, 2, 10, 12)
    compiled = fast(net)
    assert_close(compiled(x), given_by(net, x))
    assert_close(compiled(x.numpy()), given_by(net, x))


@pytest.mark.parametrize("dimensions", [1, 2, 6])
def test_arrays_that_are_no_volumes_are_refused(dimensions: int) -> None:
    with pytest.raises(VolumeError) as caught:
        fast(unet())(np.zeros((8,) * dimensions, np.float32))
    assert str((8,) * dimensions) in str(caught.value)


def test_tuples_and_dictionaries_come_back_as_they_are() -> None:
    def make(net: Any) -> None:
        net.one, net.two = conv(1, 2), conv(1, 3)

    both = module(make, lambda net, x: (net.one(x), net.two(x).sigmoid()))
    x = image(2, 1, 8, 8, 8)
    found = fast(both)(x)
    assert isinstance(found, tuple)
    for one, exact in zip(found, given_by(both, x), strict=True):
        assert_close(one, exact)
    named = module(make, lambda net, x: {"boundary": net.one(x), "distance": net.two(x)})
    by_name = fast(named)(x)
    assert list(by_name) == ["boundary", "distance"]
    for name, exact in given_by(named, x).items():
        assert_close(by_name[name], exact)


def test_outputs_of_several_sizes_are_refused_and_one_can_be_asked_for() -> None:
    import torch

    def make(net: Any) -> None:
        net.one, net.two = conv(1, 2), conv(1, 3)

    net = module(make, lambda net, x: {"fine": net.one(x), "coarse": net.two(torch.nn.functional.max_pool3d(x, 2))})
    with pytest.raises(ShapeError):
        fast(net)(image(1, 1, 8, 8, 8))
    fine = znnpy.from_torch(net, outputs=["fine"])
    x = image(1, 1, 8, 8, 8)
    assert_close(fine(x.numpy()[0], calibrate=False, threads=1, ram="4G"), given_by(net, x)["fine"][0])
    with pytest.raises(NetworkFileError) as caught:
        znnpy.from_torch(net, outputs=["medium"])
    assert "fine" in str(caught.value)


def test_names_and_normalisation_are_those_asked_for() -> None:
    net = unet()
    made = znnpy.from_torch(net, name="boundaries", normalise=znnpy_normalise(100.0, 20.0), pad_to_period="zeros")
    assert (made.network.name, made.network.pad_to_period) == ("boundaries", "zeros")
    grey = np.random.default_rng(0).integers(0, 255, (8, 8, 8)).astype(np.uint8)
    import torch

    exact = given_by(net, torch.from_numpy((grey.astype(np.float32) - 100) / 20)[None, None])
    assert_close(made(grey, calibrate=False, threads=1, ram="4G"), exact[0])
    assert znnpy.from_torch(net).network.name == "Net"


def znnpy_normalise(mean: float, std: float) -> Any:
    from znnpy.network import Normalise

    return Normalise((mean,), (std,))


# --- what modules hold ---


def test_dropout_does_nothing() -> None:
    import torch

    assert_same(chain(conv(), torch.nn.Dropout3d(0.5), torch.nn.Dropout(0.3), conv(3, 2)))


def test_value_that_is_changed_in_place_and_read_again_is_the_changed_one() -> None:
    import torch

    def make(net: Any) -> None:
        net.conv, net.relu = conv(1, 3), torch.nn.ReLU(inplace=True)

    def read_later(net: Any, x: Any) -> Any:
        first = net.conv(x)
        second = net.relu(first)
        return first * 2 + second

    def read_before_too(net: Any, x: Any) -> Any:
        first = net.conv(x)
        before = first - 1
        first += 3
        net.relu(first)
        return before + first

    def read_copy(net: Any, x: Any) -> Any:
        first = net.conv(x)
        copy = first.clone()
        first += 5
        return copy * 1.5 + first

    assert_same(module(make, read_later))
    assert_same(module(make, read_copy))
    assert_same(module(make, read_before_too))


def test_weights_that_two_parts_share_are_used_by_both() -> None:
    def make(net: Any) -> None:
        net.one, net.other = conv(2, 2), conv(2, 2)
        net.other.weight = net.one.weight

    assert_same(module(make, lambda net, x: net.other(net.one(x).relu())), maps=2)
    twice = module(lambda net: setattr(net, "one", conv(2, 2)), lambda net, x: net.one(net.one(x).relu()))
    assert_same(twice, maps=2)


def test_weight_norm_is_computed_once() -> None:
    import torch

    normed = torch.nn.utils.parametrizations.weight_norm
    assert_same(chain(normed(conv(1, 4)), torch.nn.ReLU(), normed(conv(4, 2))))


def test_functions_in_place_of_modules() -> None:
    import torch
    from torch.nn import functional

    def make(net: Any) -> None:
        net.weight = torch.nn.Parameter(image(4, 1, 3, 3, 3))
        net.register_buffer("mean", torch.tensor(0.3))

    def forward(net: Any, x: Any) -> Any:
        x = functional.conv3d((x - net.mean) / 2, net.weight, padding="same")
        x = functional.leaky_relu(x, 0.2) + functional.gelu(x)
        x = functional.interpolate(functional.avg_pool3d(x, 2), scale_factor=2, mode="trilinear")
        return torch.softmax(x, dim=1)

    assert_same(module(make, forward))


# --- what stands in the way ---


def test_module_in_training_mode_is_refused() -> None:
    import torch

    net = chain(conv(), torch.nn.BatchNorm3d(3))
    net[1].train()
    refused(net, "training mode", "1", "eval()")
    refused(net.train(), "the module itself")


def test_batch_norm_without_running_statistics_is_refused() -> None:
    import torch

    refused(chain(conv(), torch.nn.BatchNorm3d(3, track_running_stats=False)), "node 1 ", "running statistics")


def test_weights_that_are_no_float32_are_refused() -> None:
    import torch

    refused(chain(conv()).double(), "float", example=torch.zeros(1, 1, 16, 16, 16))

    def make(net: Any) -> None:
        net.register_buffer("weight", torch.ones(2, 1, 3, 3, 3, dtype=torch.int64))

    net = module(make, lambda net, x: torch.nn.functional.conv3d(x, net.weight.float()))
    assert_same(net)
    raw = module(make, lambda net, x: torch.nn.functional.conv3d(x, net.weight))
    refused(raw, "node conv3d ", example=torch.zeros(1, 1, 16, 16, 16))


def test_weights_that_are_not_finite_are_refused() -> None:
    import torch

    net = chain(conv(1, 3), torch.nn.ReLU(), conv(3, 2))
    net[2].weight.data[1, 2, 0, 1, 2] = float("nan")
    refused(net, "node 2 ", "1 of 162", "(1, 2, 0, 1, 2)")


def test_control_flow_by_values_is_refused() -> None:
    def forward(net: Any, x: Any) -> Any:
        return net.conv(x) if x.sum() > 0 else net.conv(-x)

    net = module(lambda net: setattr(net, "conv", conv()), forward)
    refused(net, "torch.export", "values", example=image(1, 1, 16, 16, 16))


def test_module_with_two_inputs_is_refused() -> None:
    import torch

    class Two(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any, y: Any) -> Any:
            return x + y

    refused(Two().eval(), "Two", "example")
    refused(Two().eval(), "Two", example=image(1, 1, 16, 16, 16))


def test_example_of_a_shape_that_is_none_is_refused() -> None:
    import torch

    net = chain(conv())
    for shape in ((16, 16, 16), (1, 16, 16), (2, 1, 16, 16, 16), (1, 1, 1, 16, 16, 16)):
        refused(net, str(shape), example=torch.zeros(shape))
    refused(net, "1x2x16x16x16", example=torch.zeros(1, 2, 16, 16, 16))


def test_no_module_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        znnpy.from_torch(lambda x: x)


def test_size_of_the_example_is_found_where_few_sizes_suit() -> None:
    import torch

    def forward(net: Any, x: Any) -> Any:
        if x.shape[2] % 12 != 5:
            raise ValueError(f"cannot take {x.shape[2]} voxels")
        return net.conv(x)

    net = module(lambda net: setattr(net, "conv", conv()), forward)
    assert_same(net, size=(17, 17, 17))
    never = module(lambda net: None, lambda net, x: torch.nn.functional.conv3d(x, torch.ones(1, 7, 3, 3, 3)))
    refused(never, "7", "example")


def test_result_that_depends_on_the_size_of_the_volume_is_refused() -> None:
    """The layers may be the same, and only a number differ."""
    import torch

    net = module(lambda net: setattr(net, "conv", conv()), lambda net, x: net.conv(x) * x.shape[2])
    refused(net, "node mul ", "other weights", "64x64x64", "129x131x133", "size of the volume")
    net = module(lambda net: None, lambda net, x: torch.nn.functional.avg_pool3d(x, x.shape[2] // 8, stride=1))
    refused(net, "average", "size of the volume", example=torch.zeros(1, 1, 16, 16, 16))


def test_operator_that_is_not_known_is_named_with_the_nearest_and_how_to_register_it() -> None:
    import torch

    def make(net: Any) -> None:
        net.body = torch.nn.Sequential(conv(1, 3), torch.nn.Hardshrink(), conv(3, 2))

    net = module(make, lambda net, x: net.body(x))
    refused(net, "body.1", "aten.hardshrink.default", "hard", "znnpy.importing.aten_walk.aten")


def test_operator_that_was_registered_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from znnpy.importing.aten_walk import HANDLERS, aten

    monkeypatch.setattr("znnpy.importing.aten_walk.HANDLERS", dict(HANDLERS))

    @aten("softsign", "log_sigmoid")  # computes another function, which is as good for the test
    def _as_tanh(builder: Any, arguments: Any) -> Any:
        return builder.activation(arguments["self"], "tanh")

    class Tanh(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return torch.nn.functional.logsigmoid(x)

    x = image(1, 1, 8, 8, 8)
    first = conv(1, 3)
    assert_close(fast(chain(first, Tanh()))(x), given_by(chain(first, torch.nn.Tanh()), x))
