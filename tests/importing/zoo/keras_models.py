"""U-Nets of StarDist, CSBDeep and IsoNet as ONNX models, with the operators that tf2onnx writes for Keras.

Arrays are (n, z, y, x, channels). A convolution or pooling stands between two transposes, and upsampling repeats along
one axis at a time: by splitting into planes where the size is known, by a tile in a new dimension where it is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper, numpy_helper

from znnpy.shapes import Vec3

FIRST, LAST = [0, 4, 1, 2, 3], [0, 2, 3, 4, 1]  # orders that put channels in dimension 1, and back
SPATIAL = (1, 2, 3)


class Keras:
    """A model that grows layer by layer. `size` is that of the volume for which it is; None: for any."""

    def __init__(self, size: Vec3 | None = None, *, same_upper: bool = False, opset: int = 17) -> None:
        self.size, self.same_upper, self.opset = size, same_upper, opset
        self.grid = 1  # voxels of the volume in one of the U-Net, along each axis
        self.nodes: list[Any] = []
        self.arrays: list[Any] = []
        self.rng = np.random.default_rng(5)

    def add(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> list[str]:
        """Add a node and return the names of what it gives."""
        number = len(self.nodes)
        names = [f"model/{kind.lower()}_{number}:{at}" for at in range(outputs)]
        self.nodes.append(
            helper.make_node(kind, list(inputs), names, name=f"model/{kind.lower()}_{number}", **attributes)
        )
        return names

    def stored(self, array: npt.NDArray[Any]) -> str:
        """Store an array and return its name."""
        name = f"const_{len(self.arrays)}"
        self.arrays.append(numpy_helper.from_array(array, name))
        return name

    def whole(self, *values: int) -> str:
        return self.stored(np.asarray(values, np.int64))

    def _within(self, x: str, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node that takes channels first, between two transposes."""
        (first,) = self.add("Transpose", x, perm=FIRST)
        (found,) = self.add(kind, first, *inputs, **attributes)
        return self.add("Transpose", found, perm=LAST)[0]

    def conv(
        self, x: str, maps: int, out: int, kernel: int = 3, stride: int = 1, activation: str = "Relu", **options: Any
    ) -> str:
        """Convolve with padding `same`, which is larger behind where it is odd."""
        weights = self.rng.normal(0, (2 / (maps * kernel**3)) ** 0.5, (out, maps, *[kernel] * 3)).astype(np.float32)
        bias = self.rng.normal(0, 0.1, out).astype(np.float32)
        total = max(0, kernel - stride)  # for sizes that are multiples of the stride
        before, behind = total // 2, total - total // 2
        pads: dict[str, Any] = {"auto_pad": "SAME_UPPER"} if self.same_upper else {"pads": [before] * 3 + [behind] * 3}
        found = self._within(
            x, "Conv", self.stored(weights), self.stored(bias), strides=[stride] * 3, kernel_shape=[kernel] * 3, **pads
        )
        return found if activation == "linear" else self.add(activation, found, **options)[0]

    def transposed(self, x: str, maps: int, out: int) -> str:
        """Upsample by 2 with a transposed convolution of 3x3x3 and padding `same`, as IsoNet does."""
        weights = self.rng.normal(0, 0.2, (maps, out, 3, 3, 3)).astype(np.float32)
        return self._within(
            x, "ConvTranspose", self.stored(weights), strides=[2] * 3, kernel_shape=[3] * 3, auto_pad="SAME_UPPER"
        )

    def norm(self, x: str, maps: int) -> str:
        """Normalise by stored statistics."""
        scale, bias, mean = (self.rng.normal(1, 0.3, maps).astype(np.float32) for _ in range(3))
        variance = self.rng.uniform(0.5, 2, maps).astype(np.float32)
        stored = [self.stored(one) for one in (scale, bias, mean, variance)]
        return self._within(x, "BatchNormalization", *stored, epsilon=1e-3)

    def pool(self, x: str) -> str:
        return self._within(x, "MaxPool", kernel_shape=[2] * 3, strides=[2] * 3, auto_pad="VALID")

    def up(self, x: str, maps: int, level: int) -> str:
        """Repeat each voxel twice along each axis; x has size / 2^(level + 1)."""
        sizes = None if self.size is None else [n // self.grid // 2 ** (level + 1) for n in self.size]
        for axis in SPATIAL:
            if sizes is None:
                x = self._repeated(x, axis)
                continue
            planes = self.add("Split", x, self.whole(*[1] * sizes[axis - 1]), outputs=sizes[axis - 1], axis=axis)
            (x,) = self.add("Concat", *(plane for plane in planes for _ in range(2)), axis=axis)
        return x

    def _repeated(self, x: str, axis: int) -> str:
        (shape,) = self.add("Shape", x)
        (added,) = self.add("Unsqueeze", x, self.whole(axis + 1))
        times = [2 if at == axis + 1 else 1 for at in range(6)]
        (tiled,) = self.add("Tile", added, self.whole(*times))
        (longer,) = self.add("Mul", shape, self.whole(*(2 if at == axis else 1 for at in range(5))))
        return self.add("Reshape", tiled, longer)[0]

    def concat(self, *parts: str) -> str:
        return self.add("Concat", *parts, axis=4)[0]

    def model(self, outputs: Sequence[tuple[str, str]]) -> Any:
        """Return the model with outputs of these names."""
        for found, name in outputs:
            self.nodes.append(helper.make_node("Identity", [found], [name], name=name))
        dims = ["batch", *(("z", "y", "x") if self.size is None else self.size), 1]
        graph = helper.make_graph(
            self.nodes,
            "tf2onnx",
            [helper.make_tensor_value_info("input", TensorProto.FLOAT, dims)],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * 5) for _, name in outputs],
            self.arrays,
        )
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)
        made.producer_name, made.producer_version = "tf2onnx", "1.16.1"
        return made


def _unet(net: Keras, x: str, maps: int, first: int, levels: int, *, normed: bool = False) -> str:
    """Add CSBDeep's U-Net: two convolutions a level, pooling, repetition, and skips that come behind."""

    def block(x: str, into: int, out: int) -> str:
        for a, b in ((into, out), (out, out)):
            x = net.conv(x, a, b, activation="linear" if normed else "Relu")
            x = net.add("Relu", net.norm(x, b))[0] if normed else x
        return x

    skips, widths = [], [first * 2**level for level in range(levels + 1)]
    for width in widths[:-1]:
        x, maps = block(x, maps, width), width
        skips.append(x)
        x = net.pool(x)
    x = block(x, maps, widths[-1])
    for level in reversed(range(levels)):
        x = net.concat(net.up(x, widths[level + 1], level), skips[level])
        x = block(x, widths[level + 1] + widths[level], widths[level])
    return x


def stardist(size: Vec3 | None = None, *, grid: bool = True, rays: int = 8) -> Any:
    """Return StarDist3D's: to the grid, the U-Net, a convolution, and heads for probability and distances."""
    net, x, maps = Keras(size, same_upper=size is None), "input", 1
    if grid:
        x, maps, net.grid = net.pool(net.conv(net.conv(x, 1, 4), 4, 4)), 4, 2
    x = _unet(net, x, maps, 4, 2)
    x = net.conv(x, 4, 12)
    return net.model(
        [(net.conv(x, 12, 1, 1, activation="Sigmoid"), "prob"), (net.conv(x, 12, rays, 1, activation="linear"), "dist")]
    )


def care(size: Vec3 | None = None, *, probabilistic: bool = False, normed: bool = False) -> Any:
    """Return CARE's: the U-Net, a linear head to which the input is added; and with it a softplus head of scales.

    normed  with batch norms, as N2V has them
    """
    net = Keras(size)
    x = _unet(net, "input", 1, 4, 2, normed=normed)
    mean = net.add("Add", net.conv(x, 4, 1, 1, activation="linear"), "input")[0]
    if not probabilistic:
        return net.model([(mean, "mean")])
    (scale,) = net.add("Softplus", net.conv(x, 4, 1, 1, activation="linear"))
    (scale,) = net.add("Add", scale, net.stored(np.asarray(0.001, np.float32)))
    return net.model([(net.concat(mean, scale), "mean_and_scale")])


def isonet(size: Vec3 | None = None) -> Any:
    """Return IsoNet's: convolutions of stride 2 whose padding is larger behind, batch norms, and the input is added."""
    net, x, maps = Keras(size), "input", 1
    skips, widths = [], (4, 8, 8)

    def step(x: str, into: int, out: int, stride: int = 1) -> str:
        x = net.norm(net.conv(x, into, out, stride=stride, activation="linear"), out)
        return net.add("LeakyRelu", x, alpha=0.05)[0]

    for width in widths[:-1]:
        x, maps = step(step(x, maps, width), width, width), width
        skips.append(x)
        x = step(x, width, width, 2)
    x = step(x, maps, widths[-1])
    for skip, out, into in zip(skips[::-1], widths[-2::-1], widths[:0:-1], strict=True):
        x = net.add("LeakyRelu", net.transposed(x, into, out), alpha=0.05)[0]
        x = step(net.concat(x, skip), 2 * out, out)
    return net.model([(net.add("Add", net.conv(x, widths[0], 1, 1, activation="linear"), "input")[0], "activation_11")])
