"""Pruned transforms of kernels: a k^3 kernel zero-padded to n^3, without multiplications by padding zeros.

A line of n with k values that are not zero is transformed by an n x k matrix of twiddle factors, and BLAS multiplies
matrices: three passes over lines that are not zero (ZNNi III-A: k^2 lines, then k n, then n^2), at eight times the flop
rate of a fast transform and, for k up to 20, with fewer operations. Twiddles are computed in float64; conjugation (a
convolution layer correlates) and the 1/n of the inverse are folded into them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Complex = npt.NDArray[np.complex64]


def twiddles(n: int, k: int, rows: int | None = None) -> Complex:
    """Return (rows or n, k) complex64: row f maps values 0..k-1 to frequency f of the conjugate transform, over n."""
    exponents = np.outer(np.arange(n if rows is None else rows), np.arange(k)) % n
    matrix: Complex = (np.exp(2j * np.pi / n * exponents) / n).astype(np.complex64)
    return matrix
