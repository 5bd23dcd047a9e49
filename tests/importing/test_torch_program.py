"""Programs of torch.export: the one in memory and the one in its file are the same, and as PyTorch made it."""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from znnpy.errors import NetworkFileError
from znnpy.importing.program import Program, Ref
from znnpy.importing.pt2_file import read_pt2

pytestmark = pytest.mark.torch


def exported(module: Any, *arrays: Any, **options: Any) -> Any:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch about itself
        return torch.export.export(module, arrays, **options)


def from_memory(program: Any) -> Program:
    from znnpy.importing.torch_program import program_of

    return program_of(program)


def from_file(program: Any, tmp_path: Path) -> Program:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(program, tmp_path / "net.pt2")
    return read_pt2(tmp_path / "net.pt2")


def both(program: Any, tmp_path: Path) -> Program:
    """Return the program, after checking that both readers give the same."""
    one, other = from_memory(program), from_file(program, tmp_path)
    assert repr(one.calls) == repr(other.calls)  # as text, since NaN is not equal to itself
    assert one.inputs == other.inputs
    assert list(one.outputs.items()) == list(other.outputs.items())
    assert list(one.constants) == list(other.constants)
    for name, array in one.constants.items():
        assert array.dtype == other.constants[name].dtype
        assert array.shape == other.constants[name].shape
        assert array.flags.c_contiguous == other.constants[name].flags.c_contiguous
        np.testing.assert_array_equal(array, other.constants[name])
    return other


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


def only(forward: Callable[[Any], Any]) -> Any:
    return module(lambda net: None, lambda net, x: forward(x))


def image(maps: int = 2) -> Any:
    import torch

    return torch.zeros(1, maps, 4, 6, 8)


def refused(program: Any, tmp_path: Path, *parts: str) -> None:
    """Check that both readers refuse the program with messages that hold the parts."""
    for read in (from_memory, lambda one: from_file(one, tmp_path)):
        with pytest.raises(NetworkFileError) as caught:
            read(program)
        for part in parts:
            assert part in str(caught.value)


def test_unet_gives_its_modules_names_and_weights(tmp_path: Path) -> None:
    import torch
    from torch import nn

    def make(net: Any) -> None:
        net.down = nn.Sequential(nn.Conv3d(2, 3, 3, padding=1, bias=False), nn.BatchNorm3d(3), nn.ReLU(inplace=True))
        net.pool = nn.MaxPool3d(2)
        net.up = nn.ConvTranspose3d(3, 3, 2, stride=2)
        net.last = nn.Conv3d(6, 2, 1)

    def forward(net: Any, x: Any) -> Any:
        y = net.down(x)
        return torch.sigmoid(net.last(torch.cat([net.up(net.pool(y)), y], 1)))

    net = module(make, forward)
    program = both(exported(net, image()), tmp_path)
    assert [(call.name, call.target.split(".")[1]) for call in program.calls] == [
        *(("down.0", "conv3d"), ("down.1", "batch_norm"), ("down.2", "relu_"), ("pool", "max_pool3d")),
        *(("up", "conv_transpose3d"), ("cat", "cat"), ("last", "conv3d"), ("sigmoid", "sigmoid")),
    ]
    assert program.inputs == [("x", (1, 2, 4, 6, 8))]
    assert program.outputs == {"0": "sigmoid"}
    assert program.calls[5].arguments == {"tensors": [Ref("conv_transpose3d"), Ref("relu_")], "dim": 1}
    np.testing.assert_array_equal(program.constants["p_down_0_weight"], net.down[0].weight.detach().numpy())
    assert program.constants["b_down_1_num_batches_tracked"].dtype == np.int64


def test_constants_in_memory_are_not_copied() -> None:
    import torch

    net = module(lambda net: setattr(net, "c", torch.nn.Conv3d(2, 2, 1)), lambda net, x: net.c(x))
    array = from_memory(exported(net, image())).constants["p_c_weight"]
    assert np.shares_memory(array, net.c.weight.detach().numpy())
    assert not array.flags.writeable


def test_tied_weights_and_parts_of_buffers_share_memory(tmp_path: Path) -> None:
    import torch
    from torch import nn

    def make(net: Any) -> None:
        net.a, net.b = nn.Conv3d(2, 2, 1), nn.Conv3d(2, 2, 1)
        net.b.weight = net.a.weight
        net.register_buffer("whole", torch.arange(24.0).reshape(2, 3, 4))
        net.register_buffer("some", net.whole[1:, :, ::2])
        net.register_buffer("temporary", torch.ones(2, 1, 1, 1), persistent=False)
        net.plain = torch.full((2, 1, 1, 1), 7.0)

    def forward(net: Any, x: Any) -> Any:
        return net.b(net.a(x)) + net.temporary + net.plain + net.some.sum() + net.whole.sum()

    constants = both(exported(module(make, forward), image()), tmp_path).constants
    assert np.shares_memory(constants["p_a_weight"], constants["p_b_weight"])
    assert np.shares_memory(constants["b_whole"], constants["b_some"])
    assert constants["c_plain"].flat[0] == 7


def test_types_and_orders_of_stored_arrays(tmp_path: Path) -> None:
    import torch
    from torch import nn

    def make(net: Any) -> None:
        net.first, net.brain = nn.Conv3d(2, 2, 3).half(), nn.Conv3d(2, 2, 3).bfloat16()
        net.last = nn.Conv3d(2, 2, 3).to(memory_format=torch.channels_last_3d)
        for name, tensor in {
            "empty": torch.zeros(0, 3),
            "repeated": torch.ones(1).expand(5),
            "transposed": torch.arange(6.0).reshape(2, 3).t(),
            "part": torch.arange(20.0)[5:9],
            "truth": torch.ones(3, dtype=torch.bool),
            "small": torch.ones(3).to(torch.float8_e4m3fn),
            "complex": torch.ones(3, dtype=torch.complex64),
        }.items():
            net.register_buffer(name, tensor)

    constants = both(exported(module(make, lambda net, x: x + 1), image()), tmp_path).constants
    assert constants["p_brain_weight"].dtype == np.float32
    assert constants["p_first_weight"].dtype == np.float16
    assert "b_small" not in constants
    assert list(constants["b_part"]) == [5, 6, 7, 8]


def nested(x: Any) -> Any:
    found: Any = defaultdict(list)
    found["k"] = x * 5
    return x + 1, OrderedDict(b=x * 2, a=[x, x]), None, 3, found


def several_calls(x: Any) -> Any:
    import torch
    import torch.nn.functional as F

    a, b = torch.chunk(F.relu_(x + 1), 2, 1)
    c = torch.split(x, [1, 1], 1)
    taken = torch.split(x, 1, 1)[1]  # the first part has no name of its own
    index = x[:, torch.tensor([1, 0])]
    largest, _ = F.max_pool3d(x, 2, return_indices=True)
    large = F.interpolate(largest, size=(4, 6, 8)) + F.interpolate(largest, scale_factor=2, mode="trilinear")
    padded = F.pad(a, (1, 1), value=-math.inf) + F.pad(b, (1, 1), mode="constant", value=math.nan)
    return {"z": padded, "a": c[0] + taken + c[0], "large": large.to(torch.float16) + index}


WORDS: list[tuple[Callable[[Any], Any], list[str]]] = [
    (nested, ["0", "1.b", "1.a.0", "1.a.1", "4.k"]),
    (several_calls, ["z", "a", "large"]),
    (lambda x: x, ["0"]),
    (lambda x: [x + 1], ["0"]),
    (lambda x: {3: x + 1}, ["3"]),
]


@pytest.mark.parametrize(("forward", "words"), WORDS, ids=range(len(WORDS)))
def test_outputs_have_the_words_of_their_structure(
    tmp_path: Path, forward: Callable[[Any], Any], words: list[str]
) -> None:
    assert list(both(exported(only(forward), image()), tmp_path).outputs) == words


def test_program_of_strict_export_and_one_that_was_loaded_are_the_same(tmp_path: Path) -> None:
    import torch

    net = module(lambda net: setattr(net, "c", torch.nn.Conv3d(2, 2, 1)), lambda net, x: net.c(net.c(x)))
    one = both(exported(net, image()), tmp_path)
    assert [call.name for call in one.calls] == ["c", "c"]
    assert repr(both(exported(net, image(), strict=True), tmp_path).calls) == repr(one.calls)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = torch.export.load(tmp_path / "net.pt2")
    assert repr(both(loaded, tmp_path).calls) == repr(one.calls)


def test_number_as_second_input_is_part_of_the_graph(tmp_path: Path) -> None:
    import torch

    class Net(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any, factor: float) -> Any:
            return x * factor

    program = both(exported(Net(), image(), 2.5), tmp_path)
    assert [name for name, _ in program.inputs] == ["x"]
    assert program.calls[0].arguments["other"] == 2.5


def test_training_mode_is_refused(tmp_path: Path) -> None:
    from torch import nn

    program = exported(nn.BatchNorm3d(2).train(), image())
    refused(program, tmp_path, "num_batches_tracked", "module.eval()")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        decomposed = program.run_decompositions({})
    refused(decomposed, tmp_path, "running_mean", "module.eval()")


def test_graphs_that_depend_on_values_are_refused(tmp_path: Path) -> None:
    import torch

    def no_grad(x: Any) -> Any:
        with torch.no_grad():
            return x + 1

    cond = only(lambda x: torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a - 1, (x,)))
    refused(exported(cond, image()), tmp_path, "torch.cond")
    refused(exported(only(no_grad), image()), tmp_path, "torch.no_grad")
    refused(exported(only(lambda x: x * x.sum().item()), image()), tmp_path, ".item()")
    sizes = ({2: torch.export.Dim("depth", min=2, max=99)},)
    convolution = torch.nn.Conv3d(2, 1, 1).eval()
    refused(exported(convolution, image(), dynamic_shapes=sizes), tmp_path, "dynamic_shapes")


def test_view_of_a_value_that_changes_in_place_is_refused(tmp_path: Path) -> None:
    def forward(x: Any) -> Any:
        y = x + 1
        view = y[:, :1]
        y.relu_()
        return y, view

    refused(exported(only(forward), image()), tmp_path, "in place")
    both(exported(only(lambda x: (x + 1).relu_().mul_(2)), image()), tmp_path)


def test_files_of_torch_save_and_torchscript_are_recognised(tmp_path: Path) -> None:
    import torch

    net, path = torch.nn.Sequential(torch.nn.Conv3d(1, 1, 1)), tmp_path / "net.pt"
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: torch.save(net.state_dict(), path), "weights_only=True))"),
        (lambda: torch.save(net.state_dict(), path, _use_new_zipfile_serialization=False), "weights_only=True))"),
        (lambda: torch.save({"epoch": 3, "state_dict": net.state_dict()}, path), "['state_dict'])"),
        (lambda: torch.save(net, path), "is a module"),
        (lambda: torch.jit.trace(net, torch.zeros(1, 1, 4, 4, 4)).save(path), "TorchScript"),
    ]
    for save, part in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save()
        with pytest.raises(NetworkFileError) as caught:
            read_pt2(path)
        assert part in str(caught.value)
        assert "torch.export.save(torch.export.export(module.eval()" in str(caught.value)
