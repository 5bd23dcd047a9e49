"""The tasks of a task-parallel convolution and their dependencies (ZNNi IV-A.3, Fig. 3). No arrays.

There are five kinds: transform of input maps, transform of kernels, multiply-add, inverse transform of output maps, and
four synchronisations between the stages. Tasks are numbered, not stored: a run counts how many are left, as 80 x 80
maps of 512 fragments would be millions of nodes. `graph` builds the same graph with networkx, to check it and to draw
it.

Multiply-adds into one place form a chain, input maps in rising order: the order of accumulation, and with it every byte
of the result, does not depend on timing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import networkx

Kind = Literal["input", "kernel", "multiply", "output", "sync"]

SYNCHRONISATIONS = 4


class Task(NamedTuple):
    """One task. Fields that its kind does not use are 0."""

    kind: Kind
    row: int = 0  # block of input maps
    column: int = 0  # block of output maps
    slab: int = 0  # part of the frequencies, for kernel and multiply
    part: int = 0  # part of the batch, for input, multiply and output; number of a synchronisation

    def __str__(self) -> str:
        match self.kind:
            case "sync":
                return f"sync {self.part}"
            case "input":
                return f"input {self.row}, images {self.part}"
            case "output":
                return f"output {self.column}, images {self.part}"
            case "kernel":
                return f"kernel {self.row} {self.column} slab {self.slab}"
            case "multiply":
                return f"multiply {self.row} {self.column} slab {self.slab}, images {self.part}"


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """The number of tasks of each kind, which is all that a run needs to know of the graph."""

    rows: int  # blocks of input maps
    columns: int  # blocks of output maps
    slabs: int  # parts of the frequencies
    transforms: int  # parts of the batch in transforms
    products: int  # parts of the batch in multiply-adds

    @property
    def inputs(self) -> int:
        return self.rows * self.transforms

    @property
    def kernels(self) -> int:
        return self.rows * self.columns * self.slabs

    @property
    def multiplies(self) -> int:
        return self.kernels * self.products

    @property
    def outputs(self) -> int:
        return self.columns * self.transforms

    def input(self, number: int) -> Task:
        """Return the input task of this number: images one after the other."""
        part, row = divmod(number, self.rows)
        return Task("input", row=row, part=part)

    def kernel(self, number: int) -> Task:
        """Return the kernel task of this number, the most distant from the sink first.

        Among equals the slab changes last: the spectra of a slab of input maps serve all output maps in turn.
        """
        rest, column = divmod(number, self.columns)
        row, slab = divmod(rest, self.slabs)
        return Task("kernel", row, column, slab)

    def output(self, number: int) -> Task:
        part, column = divmod(number, self.columns)
        return Task("output", column=column, part=part)

    def distance(self, task: Task) -> int:
        """Return the tasks on the longest path from `task` to the last synchronisation: the most distant runs first."""
        match task.kind:
            case "output":
                return 1
            case "multiply":
                return 2 + self.rows - task.row
            case "kernel":
                return 3 + self.rows - task.row
            case "input":
                return 4 + self.rows + 1
            case "sync":
                return (5 + self.rows + 1, 3 + self.rows + 1, 2, 0)[task.part]

    def tasks(self) -> Iterator[Task]:
        """Yield all tasks, each after those it waits for."""
        yield Task("sync", part=0)
        yield from map(self.input, range(self.inputs))
        yield Task("sync", part=1)
        for number in range(self.kernels):
            yield (kernel := self.kernel(number))
            yield from (kernel._replace(kind="multiply", part=part) for part in range(self.products))
        yield Task("sync", part=2)
        yield from map(self.output, range(self.outputs))
        yield Task("sync", part=3)

    def before(self, task: Task) -> Iterator[Task]:
        """Yield the tasks that `task` waits for."""
        match task.kind:
            case "input":
                yield Task("sync", part=0)
            case "kernel":
                yield Task("sync", part=1)
            case "multiply":
                yield task._replace(kind="kernel", part=0)
                if task.row:
                    yield task._replace(row=task.row - 1)
            case "output":
                yield Task("sync", part=2)
            case "sync" if task.part == 1:
                yield from map(self.input, range(self.inputs))
            case "sync" if task.part == 2:
                for column, slab, part in product(range(self.columns), range(self.slabs), range(self.products)):
                    yield Task("multiply", self.rows - 1, column, slab, part)
            case "sync" if task.part == 3:
                yield from map(self.output, range(self.outputs))


def graph(tasks: TaskGraph) -> networkx.DiGraph:
    """Build the whole graph, for small ones: nodes are Tasks, edges point from a task to those that wait for it."""
    import networkx  # takes a quarter of a second to load, and runs do not need it

    whole = networkx.DiGraph()
    for task in tasks.tasks():
        whole.add_node(task)
        whole.add_edges_from((earlier, task) for earlier in tasks.before(task))
    return whole


def check(tasks: TaskGraph, whole: networkx.DiGraph) -> None:
    """Raise ValueError unless `whole` is acyclic, with one source, one sink and the distances that `tasks` uses."""
    import networkx

    if not networkx.is_directed_acyclic_graph(whole):
        raise ValueError(f"{tasks} has a cycle: {networkx.find_cycle(whole)}")
    ends = [task for task, degree in whole.out_degree if degree == 0]
    starts = [task for task, degree in whole.in_degree if degree == 0]
    if starts != [Task("sync", part=0)] or ends != [Task("sync", part=SYNCHRONISATIONS - 1)]:
        raise ValueError(f"{tasks} begins with {starts} and ends with {ends}, not with one synchronisation each")
    distances: dict[Task, int] = {}
    for task in reversed(list(networkx.topological_sort(whole))):
        distances[task] = max((1 + distances[later] for later in whole.successors(task)), default=0)
        if distances[task] != tasks.distance(task):
            raise ValueError(f"{task} is {distances[task]} tasks from the sink, not {tasks.distance(task)}")
