"""`znnpy.torch.Dense` gives what the module in it gives: on tensors of all kinds, after changes, in copies."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from znnpy.errors import NetworkFileError, VolumeError

pytestmark = pytest.mark.torch

CPU: dict[str, Any] = {"threads": 1, "ram": "4G", "calibrate": False}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Let PyTorch compute its small layers on one thread."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def chain() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(1)
    return nn.Sequential(nn.Conv3d(2, 4, 3), nn.ReLU(), nn.Conv3d(4, 3, (1, 3, 3)), nn.Sigmoid()).eval()


def tensor(*shape: int) -> Any:
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def dense(module: Any, **options: Any) -> Any:
    from znnpy.torch import Dense

    return Dense(module, **{**CPU, **options})


def assert_equal(found: Any, expected: Any) -> None:
    import torch

    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * max(1.0, float(expected.abs().max())))


def test_it_stands_in_for_a_module_in_another_one() -> None:
    import torch
    from torch import nn

    inner = chain()
    outer = nn.Sequential(nn.AvgPool3d((1, 2, 2)), inner, nn.Flatten(2)).eval()
    before = [tensor(2, 2, *size) for size in ((7, 20, 22), (5, 16, 30), (7, 20, 22))]
    with torch.no_grad():
        expected = [outer(one) for one in before]
        outer[1] = dense(inner)
        for one, right in zip(before, expected, strict=True):
            found = outer(one)
            assert found.shape == right.shape
            assert_equal(found, right)
    assert set(outer.state_dict()) == {f"1.module.{name}" for name in inner.state_dict()}


def test_types_and_layouts_of_tensors() -> None:
    import torch

    module = chain()
    ours, x = dense(module), tensor(1, 2, 7, 9, 11)
    expected = module(x).detach()
    assert_equal(ours(x), expected)
    assert not ours(x.requires_grad_()).requires_grad
    x = x.detach()
    turned = x.transpose(2, 4).contiguous().transpose(2, 4)
    assert not turned.is_contiguous()
    assert_equal(ours(turned), expected)
    assert_equal(ours(x[0]), expected[0])
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        found = ours(x.to(dtype))
        assert found.dtype == dtype
        assert_equal(found.float(), module(x.to(dtype).float()).detach().to(dtype).float())
    grey = torch.arange(2 * 5 * 6 * 7, dtype=torch.uint8).reshape(1, 2, 5, 6, 7)
    assert ours(grey).dtype == torch.float32
    assert_equal(ours(grey), module(grey.float()).detach())
    for wrong, words in ((x.long(), "the tensor is torch.int64; give"), (x.to(torch.complex64), "torch.complex64")):
        with pytest.raises(VolumeError, match=words):
            ours(wrong)
    with pytest.raises(TypeError, match="the volume is a tensor, and not ndarray"):
        ours(x.numpy())
    with pytest.raises(VolumeError, match=r"the volume has the shape \(7, 9\)"):
        ours(x[0, 0, :, :, 0])


def test_memory_of_tensors_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """DLPack hands over memory: the array that is read is the tensor, and the result is the array that was written."""
    from znnpy.array_session import ArraySession

    seen: list[tuple[int, int]] = []
    call = ArraySession.__call__

    def noting(session: Any, array: np.ndarray[Any, Any]) -> Any:
        found = call(session, array)
        seen.append((array.ctypes.data, found.ctypes.data))
        return found

    monkeypatch.setattr(ArraySession, "__call__", noting)
    ours, x = dense(chain()), tensor(2, 7, 9, 11)
    found = ours(x)
    assert seen == [(x.data_ptr(), found.data_ptr())]


def test_shapes_are_planned_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from znnpy import array_session

    entered = []
    sessions_of = array_session.sessions_of  # type: ignore[attr-defined]

    def counting(plan: Any, *given: Any) -> Any:
        entered.append(plan.output)
        return sessions_of(plan, *given)

    monkeypatch.setattr(array_session, "sessions_of", counting)
    ours = dense(chain())
    for size in ((7, 9, 11), (8, 9, 10), (7, 9, 11)):
        ours(tensor(2, *size))
    assert entered == [(5, 5, 7), (6, 5, 6)]
    ours.close()
    ours(tensor(2, 7, 9, 11))
    assert len(entered) == 3


def test_changed_weights_and_modes_are_noticed() -> None:
    import torch

    module, x = chain(), tensor(1, 2, 7, 9, 11)
    ours = dense(module)
    before = ours(x)
    module[0].weight.data.mul_(1.5)
    assert_equal(ours(x), module(x).detach())
    assert not torch.equal(ours(x), before)
    other = chain()
    ours.load_state_dict({f"module.{name}": value for name, value in other.state_dict().items()})
    assert_equal(ours(x), other(x).detach())
    ours.train()
    with pytest.raises(NetworkFileError, match="training mode"):
        ours(x)
    ours.eval()
    assert_equal(ours(x), other(x).detach())


def test_several_outputs_and_images_come_as_the_module_gives_them() -> None:
    from torch import nn

    class Two(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv3d(2, 3, 3, padding=1)

        def forward(self, x: Any) -> Any:
            y = self.conv(x)
            return {"maps": y, "above": y.relu()}

    module, x = Two().eval(), tensor(2, 2, 7, 9, 11)
    found, expected = dense(module)(x), module(x)
    assert list(found) == list(expected)
    for name, one in found.items():
        assert_equal(one, expected[name].detach())
    for wrapped in (lambda y: (y,), lambda y: [y]):  # a list comes as a tuple
        module.forward = lambda x, wrapped=wrapped: wrapped(module.conv(x))
        (one,) = dense(module)(x)
        assert_equal(one, module(x)[0].detach())
    flat, images = nn.Conv2d(1, 2, 3).eval(), tensor(4, 1, 9, 11)
    assert_equal(dense(flat)(images), flat(images).detach())


def test_an_example_counts_also_when_weights_have_changed() -> None:
    """No array without an example suits: the first convolution has another number of channels than the module."""
    import torch
    from torch import nn

    class Sides(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv3d(1, 2, 1)

        def forward(self, x: Any) -> Any:
            return self.conv(x[:, 4:5])

    module, x = Sides().eval(), tensor(1, 5, 7, 9, 11)
    ours = dense(module, example=torch.empty(1, 5, 7, 9, 11))
    assert_equal(ours(x), module(x).detach())
    module.conv.weight.data.mul_(1.5)
    assert_equal(copy.deepcopy(ours)(x), module(x).detach())


def test_a_batch_of_none_is_refused() -> None:
    with pytest.raises(VolumeError, match="holds nothing"):
        dense(chain())(tensor(0, 2, 7, 9, 11))


def test_options_are_those_of_a_session() -> None:
    import torch
    from torch import nn

    module, x = nn.Conv3d(2, 3, 3, padding=1).eval(), tensor(1, 2, 12, 14, 16)
    labels = dense(module, window=(12, 14, 16), output="labels")(x)
    assert labels.dtype == torch.uint8
    assert torch.equal(labels[:, 0].long(), module(x).argmax(dim=1))
    with pytest.raises(TypeError, match="colour"):
        dense(module, colour=1)
    with pytest.raises(ValueError, match="there is no device 'tpu'"):
        dense(module, device="tpu")


def test_copies_and_pickles_compute_by_themselves() -> None:
    module, x = chain(), tensor(1, 2, 7, 9, 11)
    ours = dense(module)
    expected = ours(x)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert_equal(other(x), expected)
        other.module[0].weight.data.zero_()
        assert_equal(ours(x), expected)


def test_threads_share_it_and_its_end_gives_back_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from znnpy.array_session import ArraySession

    left = []
    leave = ArraySession.__exit__

    def noting(session: ArraySession, *cause: Any) -> None:
        left.append(session.output_maps)
        leave(session, *cause)

    monkeypatch.setattr(ArraySession, "__exit__", noting)
    ours, x = dense(chain(), threads=2), tensor(1, 2, 7, 9, 11)
    expected = ours(x)
    with ThreadPoolExecutor(4) as callers:
        for found in callers.map(ours, [x] * 4):
            assert_equal(found, expected)
    del callers
    gone = weakref.ref(ours.runner)
    assert left == []
    del ours
    gc.collect()
    assert gone() is None
    assert left == [(3,)]
