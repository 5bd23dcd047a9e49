"""Many processes write one output: each computes work items, which are parts of it that nobody else writes.

`prepare` creates the output and divides it, `run_items` computes items in any process that sees the files, and `finish`
gives the complete output its name. `znnpy.infer` does all three, for workers of dask and for parts of job arrays.
"""

from __future__ import annotations

from znnpy.cluster import preparing
from znnpy.cluster.claims import ItemRecord
from znnpy.cluster.finishing import finish
from znnpy.cluster.job import Job
from znnpy.cluster.running import Limits, run_items
from znnpy.option_declarations import function_of
from znnpy.options import InferOptions

__all__ = ["ItemRecord", "Job", "Limits", "finish", "prepare", "run_items"]


@function_of(InferOptions)
def prepare(asked: InferOptions) -> Job:
    """Create the output of a job, or continue it with `resume`; return its name, which pickles small.

    OPTIONS

    Errors are those of `znnpy.infer`, and ShapeError where the output cannot be divided into such items.
    """
    return preparing.prepare(asked)
