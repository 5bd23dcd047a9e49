"""Every kernel of ours compiles for every card people own, spills nothing and keeps to its registers. Needs no card."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.support.nvrtc import compile_for
from znnpy.kernels.gpu.kernel_instances import ARCHITECTURES, instances
from znnpy.kernels.gpu.kernel_source import KERNELS, ONE_CARD, KernelInstance

pytestmark = pytest.mark.slow

Program = tuple[int, str, tuple[tuple[str, int | str], ...]]  # architecture, source, defines


def some() -> Iterator[tuple[int, KernelInstance]]:
    """Two instances of each kernel, the smallest and the largest, for one architecture; sources take these in turn.

    The registers of all others are checked by the cases marked `long` only.
    """
    sources = list(dict.fromkeys(instance.source for instance in instances()))
    kernels: dict[tuple[str, str], list[KernelInstance]] = {}
    for instance in instances():
        kernels.setdefault((instance.source, instance.name.split("<")[0]), []).append(instance)
    for (source, _), found in kernels.items():
        cards = architectures_of(source)
        for instance in dict.fromkeys((found[0], found[-1])):
            yield cards[sources.index(source) % len(cards)], instance


def everything() -> Iterator[tuple[int, KernelInstance]]:
    """Each instance for one architecture in turn, so that every architecture sees every source."""
    found: dict[str, list[KernelInstance]] = {}
    for instance in instances():
        found.setdefault(instance.source, []).append(instance)
    for source, kernels in found.items():
        cards = architectures_of(source)
        for turn in range(max(len(kernels), len(cards))):  # a few kernels have several turns
            yield cards[turn % len(cards)], kernels[turn % len(kernels)]


def architectures_of(source: str) -> tuple[int, ...]:
    return (90,) if source in ONE_CARD else ARCHITECTURES


def programs(chosen: Iterable[tuple[int, KernelInstance]]) -> dict[Program, list[KernelInstance]]:
    """Return the sources that are compiled together."""
    found: dict[Program, list[KernelInstance]] = {}
    for architecture, instance in chosen:
        found.setdefault((architecture, instance.source, instance.defines), []).append(instance)
    return found


@pytest.mark.parametrize(
    ("program", "kernels"),
    [
        *(pytest.param(*item, id=f"two of each, sm_{item[0][0]} {item[0][1]}") for item in programs(some()).items()),
        *(
            pytest.param(*item, id=f"all, sm_{item[0][0]} {item[0][1]}", marks=pytest.mark.long)
            for item in programs(everything()).items()
        ),
    ],
)
def test_kernels_compile_within_their_registers(program: Program, kernels: list[KernelInstance]) -> None:
    architecture, source, defines = program
    used = compile_for(architecture, source, [kernel.name for kernel in kernels], dict(defines))
    wrong = []
    for kernel in kernels:
        took = used[kernel.name]
        within = took.registers <= kernel.registers and took.stack <= kernel.stack_bytes
        if not within or took.spilled > kernel.spilled_bytes:
            wrong.append(f"{kernel.name}: {took}, and may take {kernel}")
    assert not wrong, "\n".join(wrong)


def test_every_source_is_compiled() -> None:
    sources = {path.relative_to(KERNELS).as_posix() for path in KERNELS.rglob("*.cu")}
    assert {instance.source for instance in instances()} == sources


def test_short_runs_compile_for_every_architecture() -> None:
    assert {architecture for architecture, _ in some()} == set(ARCHITECTURES)


@pytest.mark.parametrize("architecture", [80, 120])
def test_assembler_report_is_parsed(tmp_path: Path, architecture: int) -> None:
    """Kernels that need a stack, more registers than they may have, shared memory, and none of these."""
    (tmp_path / "greedy.cu").write_text(
        """
        template <int COUNT> __global__ void indexed(const float* in, float* out, int at) {
            float values[COUNT];
            for (int i = 0; i < COUNT; ++i) values[i] = in[i * 1024 + threadIdx.x];
            for (int i = 0; i < COUNT; ++i) out[i * 1024 + threadIdx.x] = values[(i * at) & (COUNT - 1)];
        }
        template <int COUNT> __global__ void __launch_bounds__(1024, 2) squeezed(const float* in, float* out) {
            float values[COUNT];
            #pragma unroll
            for (int i = 0; i < COUNT; ++i) values[i] = in[i * 1024 + threadIdx.x];
            __syncthreads();
            #pragma unroll
            for (int turn = 1; turn < 4; ++turn)
                #pragma unroll
                for (int i = 0; i < COUNT; ++i) values[i] = values[i] * values[(i + 7 * turn) % COUNT] + turn;
            #pragma unroll
            for (int i = 0; i < COUNT; ++i) out[i * 1024 + threadIdx.x] = values[i];
        }
        extern "C" __global__ void shares(float* out) {
            __shared__ float part[__CUDA_ARCH__ / 10];
            part[threadIdx.x] = out[threadIdx.x];
            __syncthreads();
            out[threadIdx.x] = part[threadIdx.x ^ 1];
        }
        extern "C" __global__ void modest(float* out) { out[threadIdx.x] = 1.0f; }
        """
    )
    names = ["indexed<64>", "squeezed<64>", "shares", "modest"]
    indexed, squeezed, shares, modest = compile_for(architecture, str(tmp_path / "greedy.cu"), names, {}).values()
    assert indexed.stack >= 256
    assert squeezed.spilled > 0
    assert squeezed.registers == (32 if architecture == 80 else 64)  # sm_120 holds 1,536 threads: one block
    assert shares.fixed_shared == 4 * architecture
    assert modest.registers <= 16
    assert (modest.stack, modest.spilled, modest.fixed_shared) == (0, 0, 0)


def test_compile_error_is_reported(tmp_path: Path) -> None:
    (tmp_path / "wrong.cu").write_text("__global__ void wrong() { nothing(); }\n")
    with pytest.raises(AssertionError, match=r'(?s)wrong.cu for sm_90:.*identifier "nothing" is undefined'):
        compile_for(90, str(tmp_path / "wrong.cu"), ["wrong"], {})


@pytest.mark.parametrize(
    ("between", "told"),
    [
        ("", None),
        ("sums[0][0] = 3.0f * sums[0][1];", r"(?s)for sm_90:.*\(C75\d\d\).* serialized .*products"),
    ],
)
def test_serialized_warpgroup_products_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, between: str, told: str | None
) -> None:
    """They occur if sums are touched between two products."""
    source = tmp_path / "waits.cu"
    source.write_text(
        f"""
        #include "wgmma.cuh"
        extern "C" __global__ void products(unsigned long long a, unsigned long long b, float* out) {{
            float sums[1][8] = {{}};
            wgmma_begin(sums);
            wgmma_half<16>(sums[0], a, b, true);
            {between}
            wgmma_half<16>(sums[0], a + 64, b + 64, true);
            wgmma_end();
            wgmma_wait(sums[0]);
            for (int i = 0; i < 8; ++i) out[i * WARPGROUP + threadIdx.x] = sums[0][i];
        }}
        """
    )
    monkeypatch.setitem(ONE_CARD, str(source), "sm_90a")
    with nullcontext() if told is None else pytest.raises(AssertionError, match=told):
        assert compile_for(90, str(source), ["products"], {})["products"].spilled == 0
