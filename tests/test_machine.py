"""Sizes are parsed as typed, limits of control groups are found wherever set, and the machine is identified."""

from __future__ import annotations

import os
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.messages import assert_holds
from znnpy import machine as machine_module
from znnpy.errors import DeviceError
from znnpy.machine import Gpu, Machine, cgroup_bytes, cgroup_cpus, limits_of, parse_bytes, process_bytes, this_machine

GPU = Gpu("a card", (9, 0), 132, 80 * 2**30, 50 * 2**20, 232448, 233472, 3.3e12, 13000, (("cupy", "14.2"),))
MACHINE = Machine("a processor", "avx512", 8, 2**34, "openblas SkylakeX", (("numpy", "2.1"), ("pyfftw", "0.15")))


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        (5, 5),
        (np.int64(7), 7),
        ("12345678", 12345678),
        ("600M", 600 * 2**20),
        (" 2g ", 2**31),
        ("1.5T", 3 * 2**39),
        ("3 KiB", 3072),
        ("0.5k", 512),
        ("8B", 8),
    ],
)
def test_sizes_are_parsed(size: int | str, nbytes: int) -> None:
    assert parse_bytes(size) == nbytes


@pytest.mark.parametrize("size", ["", "G", "-1G", "1e9", "2X", "2GG", "1,5G", "two"])
def test_invalid_size_is_refused(size: str) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"{size!r} is not a size: give a number with K, M, G or T, such as")
    ):
        parse_bytes(size)


@pytest.mark.parametrize("size", ["2", " 16", "1048575", "0.5"])
def test_number_without_unit_is_refused_with_advice(size: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"write {size.strip()}M or {size.strip()}G")):
        parse_bytes(size)


@pytest.mark.parametrize(("size", "shown"), [(2e9, "2000000000.0 is a float"), (b"2G", "b'2G' is a bytes")])
def test_size_of_another_type_is_refused(size: Any, shown: str) -> None:
    message = f"a size is a whole number of bytes or text such as '600M' or '2G', and {shown}"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        limits_of(MACHINE, ram=size)


def test_limits_default_to_the_machine_and_are_checked() -> None:
    default = limits_of(MACHINE)
    assert (default.ram_bytes, default.threads) == (3 * 2**32, 8)
    asked = limits_of(MACHINE, "300M", 3)
    assert (asked.ram_bytes, asked.threads) == (300 * 2**20, 3)
    with pytest.raises(ValueError, match="a RAM limit must be positive, not 0 bytes"):
        limits_of(MACHINE, 0)
    with pytest.raises(ValueError, match="a run needs at least one thread, not 0"):
        limits_of(MACHINE, None, 0)


def test_vram_limit_defaults_to_nine_tenths_of_free_memory() -> None:
    """Nine tenths of what is free, or what is asked for and free; no limit where no GPU is used."""
    with_gpu = replace(MACHINE, gpu=GPU)
    assert limits_of(MACHINE).vram_bytes is None
    assert limits_of(with_gpu).vram_bytes is None
    assert limits_of(with_gpu, free_bytes=10**9).vram_bytes == 9 * 10**8
    assert limits_of(with_gpu, vram="600M", free_bytes=10**9).vram_bytes == 600 * 2**20
    assert limits_of(with_gpu, vram=10**9, free_bytes=10**9).vram_bytes == 10**9
    with pytest.raises(ValueError, match="a VRAM limit must be positive, not 0 bytes"):
        limits_of(with_gpu, vram=0, free_bytes=10**9)


def test_memory_held_by_other_programs_is_not_promised() -> None:
    with pytest.raises(DeviceError) as caught:
        limits_of(replace(MACHINE, gpu=GPU), vram="60G", free_bytes=20 * 2**30)
    assert_holds(caught.value, "`vram` allows 60.0 GiB", "80.0 GiB", "only 20.0 GiB are free", "vram='20480M'")


def cgroups(folder: Path, own: str, files: dict[str, str]) -> tuple[Path, Path]:
    """Make a system with control groups: the process's own list, and the files where they are mounted."""
    listed, root = folder / "cgroup", folder / "mount"
    listed.write_text(own)
    root.mkdir()
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content + "\n")
    return listed, root


SLURM = "system.slice/slurmstepd.scope/job_7/step_0"


@pytest.mark.parametrize(
    ("own", "files", "nbytes", "cpus"),
    [
        ("", {}, None, None),
        ("", {"memory.max": "300", "cpu.max": "150000 100000"}, 300, 1.5),
        ("0::/\n", {"memory.max": "300", "cpu.max": "150000 100000"}, 300, 1.5),
        ("0::/\n", {"memory.max": "max", "cpu.max": "max 100000"}, None, None),
        (
            f"0::/{SLURM}\n",
            {
                "memory.max": "900",
                "system.slice/slurmstepd.scope/job_7/memory.max": "500",  # the job's, above its step
                "system.slice/slurmstepd.scope/job_7/cpu.max": "400000 100000",
                "system.slice/slurmstepd.scope/job_8/memory.max": "1",  # a neighbour's
                f"{SLURM}/memory.max": "max",
                f"{SLURM}/cpu.max": "max 100000",
            },
            500,
            4.0,
        ),
        (
            "0::/user.slice/run-1.scope\n",
            {"user.slice/run-1.scope/memory.max": "700", "user.slice/memory.max": "800"},
            700,
            None,
        ),
        (
            "5:memory:/slurm/job_7\n4:cpu,cpuacct:/slurm/job_7\n3:cpuset:/small\n1:name=systemd:/memory\n",
            {
                "memory/memory.limit_in_bytes": str(2**63 - 4096),
                "memory/slurm/memory.limit_in_bytes": "600",
                "memory/slurm/job_7/memory.limit_in_bytes": "650",
                "memory/small/memory.limit_in_bytes": "1",
                "cpu,cpuacct/slurm/job_7/cpu.cfs_quota_us": "250000",
                "cpu,cpuacct/slurm/job_7/cpu.cfs_period_us": "100000",
                "cpu,cpuacct/slurm/cpu.cfs_quota_us": "-1",
                "cpu,cpuacct/slurm/cpu.cfs_period_us": "100000",
            },
            600,
            2.5,
        ),
        (
            "5:memory:/docker/4f\n0::/\n",  # as the host names it; the container sees its own group at the mount
            {"memory/memory.limit_in_bytes": "400", "unified/memory.max": "450"},
            400,
            None,
        ),
        ("0::/../outside\n", {"memory.max": "300"}, 300, None),
    ],
    ids=["none", "no list", "v2 mount", "v2 unlimited", "v2 Slurm", "v2 systemd", "v1 Slurm", "hybrid", "outside"],
)
def test_limits_of_control_groups_are_read(
    tmp_path: Path, own: str, files: dict[str, str], nbytes: int | None, cpus: float | None
) -> None:
    listed, root = cgroups(tmp_path, own, files)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "memory.max").write_text("1")
    assert min(cgroup_bytes(listed, root), default=None) == nbytes
    assert min(cgroup_cpus(listed, root), default=None) == cpus


def test_system_without_control_groups_has_no_limit(tmp_path: Path) -> None:
    assert list(cgroup_bytes(tmp_path / "no", tmp_path / "none")) == []
    assert list(cgroup_cpus(tmp_path / "no", tmp_path / "none")) == []


ODD_NUMBERS = [
    "",
    "max",
    "garbage",
    "-5",
    "0",
    "+7",
    "1.5",
    "0x10",
    "1e9",
    "nan",
    "\N{SUPERSCRIPT TWO}",
    "\N{ARABIC-INDIC DIGIT FIVE}",
    "9" * 5000,
    "\0",
]
OWN_V1 = "5:memory:/a\n4:cpu,cpuacct:/a\n"


@pytest.mark.parametrize("content", ODD_NUMBERS, ids=lambda content: repr(content)[:20])
def test_control_group_files_without_a_limit_are_ignored(tmp_path: Path, content: str) -> None:
    """Control groups of versions 1 and 2 set no limit if a quota or a period is not a number or is 0."""
    quotas = (content, f"{content} 100000", f"100000 {content}", f"{content} {content}", f"max {content}")
    for number, quota in enumerate(quotas):
        folder = tmp_path / str(number)
        folder.mkdir()
        listed, root = cgroups(folder, "0::/\n", {"memory.max": content, "cpu.max": quota})
        assert list(cgroup_bytes(listed, root)) == list(cgroup_cpus(listed, root)) == []
    for number, (quota, period) in enumerate(((content, "100000"), ("100000", content), (content, content))):
        folder = tmp_path / f"v1 {number}"
        folder.mkdir()
        files = {"cpu.cfs_quota_us": quota, "cpu.cfs_period_us": period}
        files = {"memory/a/memory.limit_in_bytes": content} | {f"cpu,cpuacct/a/{k}": v for k, v in files.items()}
        listed, root = cgroups(folder, OWN_V1, files)
        assert list(cgroup_bytes(listed, root)) == list(cgroup_cpus(listed, root)) == []


def test_huge_limits_of_control_groups_are_read(tmp_path: Path) -> None:
    largest = str(2**63 - 1)
    listed, root = cgroups(tmp_path, "0::/\n", {"memory.max": largest, "cpu.max": f"{largest} 1"})
    assert list(cgroup_bytes(listed, root)) == [2**63 - 1]
    assert list(cgroup_cpus(listed, root)) == [float(2**63 - 1)]


def test_unreadable_control_group_files_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder, bytes that are no text, a pipe, and a file that the system gives to nobody."""
    listed, root = cgroups(tmp_path, "0::/a/b\n", {"memory.max": "300", "cpu.max": "200000 100000"})
    (root / "a/b/memory.max").mkdir(parents=True)
    (root / "a/memory.max").write_bytes(b"\xff\xfe\x00")
    os.mkfifo(root / "a/b/cpu.max")
    (root / "a/cpu.max").symlink_to("cpu.max")
    assert list(cgroup_bytes(listed, root)) == [300]
    assert list(cgroup_cpus(listed, root)) == [2.0]

    def denied(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(machine_module, "open_regular", denied)
    assert list(cgroup_bytes(listed, root)) == list(cgroup_cpus(listed, root)) == []


@pytest.mark.parametrize(
    "own",
    ["garbage", "0:", "0::", "::", "0::relative/path\n", "0::/a\0b\n", "0::/" + "x" * 5000, "\xff\xfe", ":" * 10**6],
    ids=lambda own: repr(own)[:20],
)
def test_invalid_lists_of_control_groups_are_ignored(tmp_path: Path, own: str) -> None:
    """The mounted group counts even if the process lists none."""
    listed, root = cgroups(tmp_path, own, {"memory.max": "300", "cpu.max": "200000 100000"})
    assert list(cgroup_bytes(listed, root)) == [300]
    assert list(cgroup_cpus(listed, root)) == [2.0]


def test_machine_is_limited_by_its_control_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "cgroup_bytes", lambda: iter([2**63, 12345]))
    monkeypatch.setattr(machine_module, "cgroup_cpus", lambda: iter([0.5, 1e6]))
    this_machine.cache_clear()
    try:
        assert (this_machine().ram_bytes, this_machine().cores) == (12345, 1)
    finally:
        this_machine.cache_clear()


def test_this_machine_has_plausible_properties() -> None:
    here = this_machine()
    assert here.cores >= 1
    assert here.ram_bytes > process_bytes() > 2**20
    assert here.simd in ("avx512", "avx2", "other")
    assert [name for name, _ in here.versions] == ["numpy", "pyfftw"]
    assert here.fingerprint == this_machine().fingerprint


def test_fingerprint_is_stable_and_depends_on_every_field() -> None:
    assert MACHINE.fingerprint == "33146066826bdb88"
    others: dict[str, Any] = {
        "processor": "b",
        "simd": "avx2",
        "cores": 9,
        "ram_bytes": 2**33,
        "blas": "openblas Zen",
        "versions": (("numpy", "2.2"), ("pyfftw", "0.15")),
        "gpu": GPU,
        "bf16": ("amx",),
    }
    assert others.keys() == {field.name for field in fields(Machine)}
    prints = {replace(MACHINE, **{name: value}).fingerprint for name, value in others.items()}
    assert len(prints | {MACHINE.fingerprint}) == 9
    newer = replace(MACHINE, gpu=replace(GPU, driver=13010))
    assert newer.fingerprint != replace(MACHINE, gpu=GPU).fingerprint


def test_blas_kernels_below_the_processor_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    assert MACHINE.blas_warning is None
    assert replace(MACHINE, simd="avx2", blas="openblas Haswell").blas_warning is None
    slow = replace(MACHINE, blas="openblas Haswell")
    assert_holds(slow.blas_warning, "openblas Haswell", "AVX-512", "the library chose them")
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    assert slow.blas_warning is not None
    assert "(OPENBLAS_CORETYPE is set)" in slow.blas_warning


def test_infinite_number_of_threads_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'99999999999999999999'\.\. is beyond any memory"):
        parse_bytes("9" * 400)
