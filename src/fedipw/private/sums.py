"""Secure sums as their users see them: what is asked for, what a client adds, what is opened.

A server asks clients to add up vectors. It learns the sum over at least ``minimum`` of them, and
no term of it. How that is done is behind :class:`SecureSums`: over messages that hide every term
(:mod:`fedipw.private.protocol`), or in process by :class:`LocalSums`, which codes vectors in the
same way and hides nothing: for studies and tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeAlias, final

import numpy as np

from fedipw.errors import FedIPWError, InputError
from fedipw.numerics import FloatArray
from fedipw.numerics.checks import check_positive
from fedipw.private.quantise import FixedPointCode, Words


class SumNotOpenedError(FedIPWError, RuntimeError):
    """A sum of which nothing was opened, with the reason: too few clients, or shares that fail."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SumRequest:
    """A vector of every client that is to be added.

    Each client makes it by the function it has registered for ``purpose``, from what it knows and
    from what ``public`` says to all: values that JSON holds.
    """

    purpose: str
    length: int  # of the vector
    bound: float = 1.0  # on every coordinate; what is beyond is cut by the client and counted
    public: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_positive(self.bound, "bound")
        if self.length < 1:
            raise InputError(f"A sum needs at least one coordinate, not {self.length!r}.")


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SumResult:
    """A sum that was opened."""

    total: FloatArray  # (length,)
    contributors: int  # whose vectors are in it
    dropped: int  # asked, and not in it
    clipped: int  # values of the contributors that were cut to the bound, itself a secure sum
    error: float  # bound on each coordinate's error (M1)

    @classmethod
    def of(cls, words: Words, code: FixedPointCode, *, contributors: int, dropped: int) -> Self:
        """Return the result of added words, whose last one counts what was cut."""
        clipped = int(words[-1])
        return cls(
            total=code.decoded(words[:-1]),
            contributors=contributors,
            dropped=dropped,
            clipped=clipped,
            error=code.error(contributors),
        )


Contribution: TypeAlias = Callable[[SumRequest], FloatArray | None]  # none: has no part in it


class SecureSums(Protocol):
    """Sums over clients, opened only for ``minimum`` of them and more."""

    def sum(self, request: SumRequest) -> SumResult:
        """Return the sum; SumNotOpenedError if nothing was opened."""
        ...


def contribution_words(values: FloatArray, request: SumRequest, code: FixedPointCode) -> Words:
    """Return what a client adds to a sum: its coded vector, and how many values it cut.

    >>> request = SumRequest(purpose="loss", length=2)
    >>> contribution_words(np.array([0.5, 7.0]), request, FixedPointCode(bound=1.0, terms=2))
    array([ 536870912, 1073741823,          1], dtype=uint32)
    """
    if np.shape(values) != (request.length,):
        raise InputError(
            f"The vector for {request.purpose!r} has shape {np.shape(values)}, not "
            f"({request.length},) as the server asks."
        )
    coded = code.coded(values)
    return np.append(coded.words, np.asarray(coded.clipped, dtype=code.dtype))


@final
class LocalSums:
    """Sums in process, coded as the protocol codes them; every vector is in clear here.

    Parameters
    ----------
    clients
        For each client its functions by purpose. One without a function for a purpose, or whose
        function returns none, has no part in that sum.
    minimum
        Fewest clients whose sum is opened.
    bits
        Of the words, 32 or 64.

    Examples
    --------
    >>> clients = [{"age": lambda request, age=age: np.array([age])} for age in (31.0, 40.0, 52.0)]
    >>> found = LocalSums(clients, minimum=3).sum(SumRequest(purpose="age", length=1, bound=120.0))
    >>> found.total.round(4).tolist(), found.contributors
    ([123.0], 3)
    """

    def __init__(
        self, clients: Sequence[Mapping[str, Contribution]], *, minimum: int, bits: int = 32
    ) -> None:
        self._clients, self._minimum, self._bits = tuple(clients), minimum, bits

    def sum(self, request: SumRequest) -> SumResult:
        """Return the sum over the clients that answer."""
        code = FixedPointCode(bound=request.bound, terms=len(self._clients), bits=self._bits)
        words = np.zeros(request.length + 1, dtype=code.dtype)
        count = 0
        for client in self._clients:
            values = client[request.purpose](request) if request.purpose in client else None
            if values is not None:
                words += contribution_words(values, request, code)
                count += 1
        check_enough(count, self._minimum)
        return SumResult.of(words, code, contributors=count, dropped=len(self._clients) - count)


def check_enough(clients: int, minimum: int) -> None:
    """Raise if too few clients are left for their sum to be opened."""
    if clients < minimum:
        raise SumNotOpenedError(
            f"{clients} clients are left of a sum that is opened for {minimum} and more: nothing "
            "is opened."
        )


@final
@dataclass(frozen=True, slots=True)
class Part:
    """Numbers of one kind in a vector: how many, and the bound on each."""

    length: int
    bound: float


@final
class Parts:
    r"""Several kinds of numbers in one vector, each in units of its own bound.

    All coordinates of the vector then lie within :math:`\pm 1`, and each kind has the resolution
    of its bound.

    Examples
    --------
    >>> parts = Parts(weight=Part(1, 20.0), moments=Part(2, 200.0))
    >>> vector = parts.packed(weight=np.array([5.0]), moments=np.array([50.0, -100.0]))
    >>> vector, parts.unpacked(vector)["moments"]
    (array([ 0.25,  0.25, -0.5 ]), array([  50., -100.]))
    """

    def __init__(self, **parts: Part) -> None:
        self._parts = {name: part for name, part in parts.items() if part.length}

    @property
    def length(self) -> int:
        """Coordinates in all."""
        return sum(part.length for part in self._parts.values())

    def packed(self, **values: FloatArray) -> FloatArray:
        """Return the vector of these values, (length,)."""
        return np.concatenate(
            [np.ravel(values[name]) / part.bound for name, part in self._parts.items()]
        )

    def stacked(self, **values: FloatArray) -> FloatArray:
        """Return the vectors of many clients, (m, length), from values with a row for each."""
        return np.column_stack([values[name] / part.bound for name, part in self._parts.items()])

    def unpacked(self, total: FloatArray) -> dict[str, FloatArray]:
        """Return the values in a vector, or in a sum of vectors, by name."""
        if total.shape != (self.length,):
            raise InputError(f"A vector of shape {total.shape} is not one of {self.length} parts.")
        out, start = {}, 0
        for name, part in self._parts.items():
            out[name] = total[start : start + part.length] * part.bound
            start += part.length
        return out
