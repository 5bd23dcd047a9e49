"""Write numbers of bytes and seconds for readers."""

from __future__ import annotations

from math import ceil

LONGEST = 1e9  # longest time that is written exactly: a plan edited by hand may hold any number


def human_bytes(nbytes: int) -> str:
    """Write bytes with three digits in the unit that suits: `1610612736` as `1.50 GiB`."""
    for power, unit in ((5, "PiB"), (4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024**power:
            amount = nbytes / 1024**power
            return f"{amount:.{2 if amount < 10 else 1 if amount < 100 else 0}f} {unit}"
    return f"{nbytes} B"


def mebibytes(nbytes: float) -> str:
    """Write bytes in MiB, the unit of `--ram 600M`, rounded up to a tenth: `120.5 MiB`."""
    return f"{ceil(nbytes * 10 / 2**20) / 10:,.1f} MiB"


def human_seconds(seconds: float) -> str:
    """Write seconds with two or three digits in the unit that suits: `36360.0` as `10 h 06 min`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if not seconds < LONGEST:
        return "over 30 years"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"
