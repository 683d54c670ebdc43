"""Real vectors as integers modulo a power of two, so that masked sums of them are exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from fedipw.errors import InputError
from fedipw.numerics import FloatArray
from fedipw.numerics.checks import check_positive

Words: TypeAlias = NDArray[np.unsignedinteger[Any]]
_TYPES: Final[Mapping[int, np.dtype[Any]]] = {32: np.dtype("<u4"), 64: np.dtype("<u8")}
_SIGNED: Final[Mapping[int, np.dtype[Any]]] = {32: np.dtype("<i4"), 64: np.dtype("<i8")}


@dataclass(frozen=True, slots=True)
class Coded:
    """A coded vector, and how many of its values were beyond the bound and cut to it."""

    words: Words  # (length,)
    clipped: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPointCode:
    r"""Numbers within :math:`\pm B` as whole multiples of a step, modulo :math:`2^k`.

    .. math:: h = B / M, \quad M = \Big\lfloor \frac{2^{k-1} - 1}{n} \Big\rfloor, \qquad
       \text{code}(x) = \text{round}(x / h) \bmod 2^k, \qquad
       \Big| h \sum_i \text{code}(x_i) - \sum_i x_i \Big| \le n \big(\tfrac12 h + 2^{-52} B\big)
       \qquad (M1)

    in each coordinate, for at most n terms: the range is divided among them, so that no sum of n
    vectors wraps around. Rounding is to the nearest multiple. A value beyond B is cut to it and
    counted; one that is not finite is an error, and its client has no part in the sum.

    Examples
    --------
    >>> code = FixedPointCode(bound=2.0, terms=100)
    >>> words = sum(code.coded(np.array([0.25 * k, -1.0])).words for k in range(5))
    >>> code.decoded(words).round(5), f"{code.error(5):.1g}"
    (array([ 2.5, -5. ]), '2e-07')
    """

    bound: float  # B
    terms: int  # n, most vectors that are added
    bits: int = 32  # k

    def __post_init__(self) -> None:
        check_positive(self.bound, "bound")
        if self.bits not in _TYPES:
            raise InputError(f"A code has 32 or 64 bits, not {self.bits!r}.")
        if not 1 <= self.terms <= self.largest // 2**7:
            raise InputError(
                f"A sum of {self.terms} vectors leaves less than 8 bits of {self.bits} to each: "
                "use 64 bits, or add fewer."
            )

    @property
    def largest(self) -> int:
        """Largest sum of codes that does not wrap around, 2^(k-1) - 1."""
        return (1 << (self.bits - 1)) - 1

    @property
    def multiples(self) -> int:
        """M, the steps between zero and the bound."""
        return self.largest // self.terms

    @property
    def step(self) -> float:
        """The step h."""
        return self.bound / self.multiples

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of words, little-endian as they are sent."""
        return _TYPES[self.bits]

    def error(self, terms: int) -> float:
        """Return the bound (M1) on the error of each coordinate of a sum of so many vectors."""
        return terms * (0.5 * self.step + 2.0**-52 * self.bound)

    def coded(self, values: FloatArray) -> Coded:
        """Return the words of a vector, (length,), and how many values were cut to the bound."""
        given = np.asarray(values, dtype=np.float64)
        if not np.isfinite(given).all():
            raise InputError("A vector that is to be added holds numbers that are not finite.")
        beyond = int(np.count_nonzero(np.abs(given) > self.bound))
        share = np.clip(given / self.bound, -1.0, 1.0)
        # 2^53 and more multiples are not all floats: the last one could round beyond M
        whole = np.clip(np.rint(share * self.multiples), -_below(self), _below(self))
        signed = whole.astype(_SIGNED[self.bits])
        return Coded(signed.view(self.dtype), beyond)

    def decoded(self, words: Words) -> FloatArray:
        """Return the real sum of added words, (length,)."""
        signed = np.asarray(words, dtype=self.dtype).view(_SIGNED[self.bits])
        out: FloatArray = signed.astype(np.float64) * self.step
        return out


def _below(code: FixedPointCode) -> float:
    """Return the largest float that is no more than M."""
    made = float(code.multiples)
    return made if int(made) <= code.multiples else float(np.nextafter(made, 0.0))
