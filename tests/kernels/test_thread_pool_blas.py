"""BLAS threads are a setting of the process: pools that overlap agree on it, and the last one out restores it."""

from __future__ import annotations

import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from znnpy.kernels.thread_pool import ThreadPool


def blas_threads() -> set[int]:
    return {int(info["num_threads"]) for info in threadpool_info() if info["user_api"] == "blas"}


@pytest.mark.parametrize("first_out", [0, 1], ids=["first in, first out", "last in, first out"])
def test_overlapping_thread_pools_restore_the_former_blas_threads(first_out: int) -> None:
    with threadpool_limits(limits=2):
        pools = [ThreadPool(1), ThreadPool(1)]
        for pool in pools:
            pool.__enter__()
        assert blas_threads() == {1}
        pools.pop(first_out).__exit__(None, None, None)
        assert blas_threads() == {1}, "a pool that is still open lost its single BLAS threads"
        pools.pop().__exit__(None, None, None)
        assert blas_threads() == {2}
