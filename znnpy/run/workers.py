"""The workers of a run: a session for each device, and the queue that they take their work from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from znnpy.kernels.thread_pool import ThreadPool
from znnpy.network import ConvWeights, Network
from znnpy.planner.co_execution import CoExecution
from znnpy.planner.plan import Plan
from znnpy.planner.run_plan import RunPlan
from znnpy.run.balanced_queue import BalancedQueue, WorkerProfile
from znnpy.run.graph_session import GraphSession
from znnpy.run.masked import work_items
from znnpy.run.masked_windows import MaskedWindows
from znnpy.run.session import Session
from znnpy.run.target import OpenTarget
from znnpy.run.window_session import WindowSession
from znnpy.run.work_queue import ColumnQueue, RowQueue, WorkQueue
from znnpy.run.worker import Worker
from znnpy.window_cover import WindowCover

if TYPE_CHECKING:
    from znnpy.run.trace import Spans
    from znnpy.volume.mask import WantedOutputs

AnySession = Session | GraphSession | WindowSession
Sessions = Mapping[str, AnySession]  # by names of devices


@contextmanager
def sessions_of(
    run: RunPlan,
    target: OpenTarget,
    network: Network,
    weights: Sequence[ConvWeights],
    trace: Spans | None = None,
    prepared: Callable[[int], None] | None = None,
) -> Iterator[Sessions]:
    """Open a session on every device of every worker.

    trace     records how long each CPU prepares, and what the sessions do
    prepared  as for `Session`
    """
    with ExitStack() as stack:
        sessions: dict[str, AnySession] = {}
        for plan in (worker.plan for worker in run.workers):
            pool = stack.enter_context(ThreadPool(plan.compute_threads))
            for name, device in target.named_devices(plan.device).items():
                session: AnySession
                if plan.sums is not None:
                    session = WindowSession(
                        plan, network, weights, pool, device=device, trace=trace, lane=name, prepared=prepared
                    )
                elif plan.area is not None:
                    session = GraphSession(
                        plan, network, weights, pool, device=device, trace=trace, lane=name, prepared=prepared
                    )
                else:
                    session = Session(
                        plan, network, weights, pool, device=device, trace=trace, lane=name, prepared=prepared
                    )
                traced = trace if plan.device == "cpu" else None
                with nullcontext() if traced is None else traced.span(name, "prepare", bytes=plan.memory.last.prepared):
                    stack.enter_context(session)
                sessions[name] = session
        yield sessions


def workers_of(
    run: RunPlan,
    sessions: Sessions,
    network: Network,
    done: Set[int] = frozenset(),
    wanted: WantedOutputs | None = None,
) -> list[Worker]:
    """Return everything that computes, with one queue of the work items that are not done.

    wanted  where outputs are wanted; None: everywhere
    """
    queue = queue_of(run, {name: session.plan for name, session in sessions.items()}, network, done, wanted)
    return [Worker(name, session, session.pool, queue) for name, session in sessions.items()]


def queue_of(
    run: RunPlan,
    plans: Mapping[str, Plan],
    network: Network,
    done: Set[int] = frozenset(),
    wanted: WantedOutputs | None = None,
) -> WorkQueue:
    """Return the queue of a run's work items; `plans` are those of its devices, by name."""
    sharing = run.sharing
    if sharing is None:
        items = work_items(run, network, wanted)
        return RowQueue(items, done) if isinstance(items, WindowCover | MaskedWindows) else ColumnQueue(items, done)
    masked = () if wanted is None else work_items(run, network, wanted)
    profiles = {name: _profile(plan, sharing, network) for name, plan in plans.items()}
    return BalancedQueue(sharing.cells, sharing.gpu.axis, profiles, done, step=sharing.gpu.patch_out, masked=masked)


def _profile(plan: Plan, sharing: CoExecution, network: Network) -> WorkerProfile:
    """Return how a device takes cells by its plan."""
    columns = partial(plan.columns_in, network=network)
    if plan.device == "gpu":
        begins, each = sharing.gpu_item_seconds()
        return WorkerProfile(columns, each, runs=True, begins=begins)
    return WorkerProfile(columns, plan.seconds_per_step, runs=False, walks=plan.streams, begins=plan.seconds_to_begin)
