"""The chance that one of several Beta draws is the greatest, by quadrature.

The integral of f_i · Π F_j (j ≠ i) is taken over t = log(x / (1 - x)), in which every Beta density is smooth, log-concave and
falls off exponentially. Panels of Gauss–Legendre nodes are halved until each density is resolved. The distribution
functions come from the same nodes, by integrating the interpolating polynomial of each panel: one `exp` and one `log`
per arm and node is the whole cost. The relative error is below 1e-8 for chances above 1e-8 and parameters up to 1e5.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.polynomial import legendre
from scipy.special import betainc, betaln

Floats: TypeAlias = npt.NDArray[np.float64]

NODES: Final = 16
REACH: Final = 36.0
"""The nodes span ± REACH in t: beyond it less than 1e-15 of any Beta with parameters of at least 1 is left."""
FIRST_PANELS: Final = 36
PANEL_DEVIATIONS: Final = 2.5
"""A panel's greatest width, in standard deviations of each density that it resolves."""
NEGLIGIBLE_LOG: Final = -40.0
"""A density this far below its peak (as a logarithm) needs no resolution."""


def integration(order: int) -> tuple[Floats, Floats, Floats]:
    """Return nodes and weights of Gauss–Legendre on [-1, 1], and the matrix that integrates from -1 to each node."""
    nodes, weights = legendre.leggauss(order)
    # The interpolating polynomial in Legendre's basis, and each basis polynomial's integral from -1.
    values = legendre.legvander(nodes, order)
    integrals = np.empty((order, order))
    integrals[:, 0] = nodes + 1
    for degree in range(1, order):
        integrals[:, degree] = (values[:, degree + 1] - values[:, degree - 1]) / (2 * degree + 1)
    coefficients = values[:, :order] * weights[:, None] * (2 * np.arange(order) + 1) / 2
    return nodes, weights, integrals @ coefficients.T


GAUSS_NODES, GAUSS_WEIGHTS, CUMULATE = integration(NODES)


class GreatestOfBetas:
    """Chances of Beta draws to be the greatest among changing sets of them.

    Args:
        a: the first parameter of each Beta, at least 1.
        b: the second one. Equal pairs cost as much as one.
    """

    __slots__ = ("_densities", "_log_cdfs", "_row", "_rows")

    def __init__(self, a: npt.ArrayLike, b: npt.ArrayLike) -> None:
        # As complex numbers, which sort by both parts: by rows of two, numpy takes several times as long.
        distinct, row = np.unique(np.asarray(a) + 1j * np.asarray(b), return_inverse=True)
        pairs = np.column_stack((distinct.real, distinct.imag))
        self._row: Final = row.reshape(-1)
        self._rows: Final = len(pairs)
        left, width = panels(pairs[:, 0], pairs[:, 1])
        t = (left[:, None] + width[:, None] * (GAUSS_NODES + 1) / 2).reshape(-1)
        # In place: each of these arrays has half a megabyte, and fresh memory costs more than the arithmetic.
        density = log_density(pairs[:, :1], pairs[:, 1:], t).reshape(self._rows, len(left), NODES)
        np.exp(density, out=density)
        density *= width[:, None] / 2
        cdf = density @ CUMULATE.T
        density *= GAUSS_WEIGHTS
        whole = density.sum(axis=2)
        begin = betainc(pairs[:, :1], pairs[:, 1:], 1 / (1 + np.exp(-left[0])))
        cdf += (np.cumsum(whole, axis=1) - whole + begin)[:, :, None]
        # A cut-off instead of log 0 = -inf, which times a count of 0 would be NaN.
        np.log(np.maximum(cdf, 1e-300, out=cdf), out=cdf)
        # Densities times weights, so that a sum over nodes is an integral.
        self._densities: Final[Floats] = density.reshape(self._rows, -1)
        self._log_cdfs: Final[Floats] = cdf.reshape(self._rows, -1)

    def chance(self, arm: int, among: npt.NDArray[np.intp]) -> float:
        """Return the chance that `arm`'s draw is the greatest of those of `among`, which contains it."""
        counts = np.bincount(self._row[among], minlength=self._rows).astype(np.float64)
        row = int(self._row[arm])
        counts[row] -= 1
        return float(self._densities[row] @ np.exp(counts @ self._log_cdfs))


def log_density(a: Floats, b: Floats, t: Floats) -> Floats:
    """Return the logarithm of the density of log(x / (1 - x)), with x from Beta(a, b), at t."""
    # log x and log(1 - x), without a loss of digits at either end.
    logarithm: Floats = a * -np.logaddexp(0, -t)
    logarithm -= b * np.logaddexp(0, t)
    logarithm -= betaln(a, b)
    return logarithm


def panels(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """Return left ends and widths of the panels that resolve the densities of all Betas, in rising order.

    They begin where the greatest of the draws begins to have a density that matters.
    """
    edges = np.linspace(-REACH, REACH, FIRST_PANELS + 1)
    a, b = a[:, None], b[:, None]
    peak, deviation = np.log(a / b), np.sqrt(1 / a + 1 / b)
    floor = log_density(a, b, peak) + NEGLIGIBLE_LOG

    def matters(edges: Floats) -> npt.NDArray[np.bool_]:
        """Return which panels have a density that matters: the densities are log-concave, so greatest next to their peaks."""
        high = log_density(a, b, edges) > floor
        before, after = peak <= edges[:-1], peak >= edges[1:]
        found: npt.NDArray[np.bool_] = np.where(before, high[:, :-1], np.where(after, high[:, 1:], True))
        return found

    begin = np.argmax(matters(edges), axis=1).max()
    edges = edges[begin:]
    while True:
        left, width = edges[:-1], np.diff(edges)
        coarse = (matters(edges) & (width > PANEL_DEVIATIONS * deviation)).any(axis=0)
        if not coarse.any():
            return left, width
        edges = np.sort(np.concatenate((edges, left[coarse] + width[coarse] / 2)))
