"""Sessions of a plan, one for each device that computes, and the queue that they take their work from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from znnpy.kernels.crew import Crew
from znnpy.network import ConvWeights, Network
from znnpy.planner.co_execution import gpu_item_seconds
from znnpy.planner.plan import Plan
from znnpy.run.devices import Site
from znnpy.run.lane import Lane
from znnpy.run.session import Session
from znnpy.run.shares import Cells, Hand, Queue, Shares

if TYPE_CHECKING:
    from znnpy.run.trace import Trace

Sessions = Mapping[str, Session]  # by names of lanes


@contextmanager
def sessions_of(
    plan: Plan,
    site: Site,
    network: Network,
    weights: Sequence[ConvWeights],
    trace: Trace | None = None,
    prepared: Callable[[int], None] | None = None,
) -> Iterator[Sessions]:
    """Open a session for every GPU of a site, or for its processor, and one for the processor beside GPUs if planned.

    A trace is told how long each processor prepares; `prepared` is as for `Session`.
    """
    numbered = {f"GPU {gpu.number}": gpu for gpu in site.gpus}
    devices = numbered if site.others else {plan.device.upper(): site.gpu}
    plans = {name: (plan, device) for name, device in devices.items()}
    if plan.cpu_plan is not None:
        plans["CPU"] = plan.cpu_plan, None
    with ExitStack() as stack:
        crews = {its.device: stack.enter_context(Crew(its.compute_threads)) for its in (plan, plan.cpu_plan) if its}
        sessions: dict[str, Session] = {}
        for name, (its, device) in plans.items():
            session = Session(
                its, network, weights, crews[its.device], device=device, trace=trace, lane=name, prepared=prepared
            )
            told = trace if its.device == "cpu" else None
            with nullcontext() if told is None else told.span(name, "prepare", bytes=its.prepared_bytes):
                stack.enter_context(session)
            sessions[name] = session
        yield sessions


def lanes_of(plan: Plan, sessions: Sessions, network: Network, done: Set[int] = frozenset()) -> list[Lane]:
    """All that compute, with one queue of what is not done: columns for devices that are alike, else cells."""
    shares = _shares(plan, sessions, network, done)
    return [Lane(name, session, session.crew, shares) for name, session in sessions.items()]


def _shares(plan: Plan, sessions: Sessions, network: Network, done: Set[int]) -> Queue:
    if plan.cpu_plan is None:
        return Shares(plan.cover(network), done)
    beside = plan.cpu_plan
    begins, each = gpu_item_seconds(plan)
    hands = {
        name: Hand(
            partial(session.plan.columns_in, network=network),
            beside.seconds_per_step if session.plan is beside else each,
            runs=session.plan is not beside,
            walks=session.plan is beside and beside.streams,
            begins=beside.seconds_to_begin if session.plan is beside else begins,
        )
        for name, session in sessions.items()
    }
    return Cells(plan.cells, plan.axis, hands, done, step=plan.patch_out)
