"""The options of every operation of a graph in steps of one size, and of convolutions with what is behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from znnpy.errors import NoPlanError
from znnpy.graph_operations import Operation
from znnpy.planner.graph_tilings import GraphTiling
from znnpy.planner.layer_options import LayerContext, OptionTable
from znnpy.planner.pareto import LayerOption, LayerRun, ParetoFront, in_sequence, pareto_front


class Fronts(NamedTuple):
    """The options of all operations in steps of one size.

    groups  the options of an operation, or of a convolution and what is behind it if some primitive computes both
    parts   the options of each operation alone, and those that compute two in one
    spent   the least seconds of each operation; of the second of a group none, they count for the convolution
    """

    groups: list[ParetoFront]
    parts: list[ParetoFront]
    spent: npt.NDArray[np.float64]


def fronts_of(tiling: GraphTiling, options: OptionTable) -> Fronts:
    """Return the options of all operations; NoPlanError if one has none."""
    graph, live = tiling.graph, tiling.live
    groups, parts, spent, number = list[ParetoFront](), list[ParetoFront](), np.zeros(len(graph.operations)), 0
    while number < len(graph.operations):
        alone, both = _alone(tiling, options, number, live), _in_one(tiling, options, number, live)
        some = [alone, _alone(tiling, options, number + 1, live), both] if both else [alone]
        if not all(some):
            missing = graph.operations[number + some.index(())]
            raise NoPlanError(_why_none(tiling, options, missing))
        if both and _is_asked_for(tiling, options, number):
            groups.append(both)
        else:
            groups.append(pareto_front((*in_sequence(some[0], some[1]), *both)) if both else alone)
        parts += some
        spent[number] = groups[-1][0].seconds
        number += len(some[:2])
    return Fronts(groups, parts, spent)


def runs_of(options: Sequence[LayerOption]) -> tuple[LayerRun, ...]:
    """Return the primitives of options in the order in which they run."""
    return tuple(run for option in options for run in option.layer_runs)


def _alone(tiling: GraphTiling, options: OptionTable, number: int, live: Sequence[int]) -> ParetoFront:
    """Return the options of one operation."""
    operation = tiling.graph.operations[number]
    context = LayerContext(live_elsewhere=live[number], steps=(tiling.executions(operation),))
    return _with_moving(tiling, options, operation, options.front((tiling.shape(operation),), context))


def _in_one(tiling: GraphTiling, options: OptionTable, number: int, live: Sequence[int]) -> ParetoFront:
    """Return the options that compute an operation and the one behind it, if there are any.

    A norm takes the place of what it normalises, the tensor of a pooling lies beside it.
    """
    both = tiling.graph.pairs.get(number)
    if both is None:
        return ()
    conv, behind = tiling.graph.operations[number : number + 2]
    elsewhere = live[number] + (0 if both.pool is None else tiling.arena_bytes(behind.tensor))
    context = LayerContext(live_elsewhere=elsewhere, steps=(tiling.executions(conv),))
    front = options.in_one((tiling.shape(conv), tiling.shape(behind)), tiling.shape(both), context)
    return _with_moving(tiling, options, both, front)


def _is_asked_for(tiling: GraphTiling, options: OptionTable, number: int) -> bool:
    """Return whether a primitive is asked for that computes an operation and the one behind it in one only."""
    conv, behind = tiling.graph.operations[number : number + 2]
    shapes = tiling.shape(conv), tiling.shape(behind)
    return bool(options.only) and options.wants_in_one(shapes, tiling.shape(tiling.graph.pairs[number]))


def _with_moving(tiling: GraphTiling, options: OptionTable, operation: Operation, front: ParetoFront) -> ParetoFront:
    """Return options with the time that keeping planes of their outputs for later steps takes."""
    moving = sum(map(tiling.carry_traffic, operation.tensors)) / options.rates.copy_bandwidth
    return tuple(_slower(option, moving) for option in front) if moving else front


def _slower(option: LayerOption, seconds: float) -> LayerOption:
    """Return an option that takes so much longer each time it runs."""
    (run,) = option.layer_runs
    slower = replace(run, seconds=run.seconds + seconds)
    return replace(option, layer_runs=(slower,), seconds=option.seconds + run.executions * seconds)


def _why_none(tiling: GraphTiling, options: OptionTable, operation: Operation) -> str:
    """Say that no primitive computes an operation."""
    name, layer = tiling.graph.network.names[operation.layer], tiling.graph.network.layers[operation.layer]
    return f"no primitive runs node {name} ({layer}) here: {options.why_none(tiling.shape(operation))}"
