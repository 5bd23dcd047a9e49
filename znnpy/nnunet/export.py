"""Make labels of logits: resample them to the cropped images, choose, and put the result where the crop was.

Logits come one class at a time, since all of them at the size of the images take many times the memory of the images.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.nnunet.dataset import Dataset
from znnpy.nnunet.plans import Plans
from znnpy.nnunet.preprocessing import NnunetCase
from znnpy.nnunet.resampling import resampled

Logits = Callable[[int], npt.NDArray[Any]]  # returns those of a class, (z, y, x) of the data of the case
Labels = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]


def labels_of(logits_of_class: Logits, classes: int, case: NnunetCase, plans: Plans, dataset: Dataset) -> Labels:
    """Return the labels of all voxels of the images of a case, (z, y, x) as their files have them.

    logits_of_class  is called once for each class, in order; what it returns is not kept
    """
    assert classes == dataset.heads, "the network has a map for each label or region"
    chosen = _by_region if dataset.order is not None else _by_largest
    return placed(chosen(lambda one: _at_images(logits_of_class(one), case, plans), dataset, case), case, plans)


def placed(labels: npt.NDArray[Any], case: NnunetCase, plans: Plans) -> Labels:
    """Return labels of the crop as part of the images of a case, with the axes of their files; the rest is 0."""
    whole = np.zeros(case.size, labels.dtype)
    whole[case.crop.slices] = labels
    return np.ascontiguousarray(whole.transpose(plans.backward))


def probabilities_of(
    logits_of_class: Logits, classes: int, case: NnunetCase, plans: Plans, dataset: Dataset
) -> npt.NDArray[np.float32]:
    """Return the probability of each class at all voxels of the images of a case, (classes, z, y, x).

    Outside the crop, label 0 has the probability 1, and regions have 0.
    """
    whole = np.zeros((classes, *case.size), np.float32)
    inside = whole[:, *case.crop.slices]
    for one in range(classes):
        inside[one] = _at_images(logits_of_class(one), case, plans)
    if dataset.order is not None:
        inside[:] = _sigmoid(inside)
    else:
        inside -= inside.max(axis=0)
        np.exp(inside, out=inside)
        inside /= inside.sum(axis=0)
        outside = np.ones(case.size, np.bool_)
        outside[case.crop.slices] = False
        whole[0][outside] = 1
    return np.ascontiguousarray(whole.transpose(0, *(axis + 1 for axis in plans.backward)))


def _at_images(logits: npt.NDArray[Any], case: NnunetCase, plans: Plans) -> npt.NDArray[Any]:
    """Return logits of a class at the voxels of the crop."""
    return resampled(logits, case.crop.size, plans.probabilities, plans.spacing, case.spacing)


def _by_largest(logits_of_class: Logits, dataset: Dataset, case: NnunetCase) -> npt.NDArray[Any]:
    """Return the class of the largest logit, the first of equal ones."""
    best = logits_of_class(0)
    labels = np.zeros(best.shape, _dtype(dataset))
    for one in range(1, dataset.heads):
        found = logits_of_class(one)
        labels[found > best] = one
        best = np.maximum(best, found)
    return labels


def _by_region(logits_of_class: Logits, dataset: Dataset, case: NnunetCase) -> npt.NDArray[Any]:
    """Return the label of the last region that a voxel is in."""
    labels = np.zeros(case.crop.size, _dtype(dataset))
    for one, label in enumerate(dataset.order or ()):
        labels[_sigmoid(logits_of_class(one).astype(np.float32)) > 0.5] = label
    return labels


def _dtype(dataset: Dataset) -> type[np.uint8] | type[np.uint16]:
    return np.uint16 if dataset.wide else np.uint8


def _sigmoid(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-x)), np.float32)
