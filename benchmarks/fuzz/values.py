"""Odd values: numbers at the edges, texts that hide or turn, types that are rare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date, datetime, time, timedelta
from typing import Any, TypeVar

import numpy as np
import polars as pl

Rng = np.random.Generator
T = TypeVar("T")

NUMBERS = (
    0.0, -0.0, 1.0, -1.0, 2.0, 0.5, 1e-3, 1e-12, 1e-100, 9e-101, 1e-154, 1e-300, 1e-310, 5e-324,
    1e3, 1e9, 1e15, 2.0**53, 1e16, 1e50, 1e99, 1e100, 1.1e100, 1e154, 1e200, 1e300, 1e308,
    1.7976931348623157e308, -1e308, -1e100, -1e-310, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
ORDINARY = (0.0, 1.0, -1.0, 2.0, 0.5, 1e-3, 1e3, 1e9, -1e9, 1e-9, 40.0)
WHOLE = (0, 1, -1, 2, 7, 127, 128, 255, 2**31 - 1, 2**31, 2**53, 2**63 - 1, -(2**63), 10**30)
TEXTS = (
    "", " ", "\t", "a", "A", "0", "1", "007", "true", "nan", "null", "None", "missing", "(missing)",
    "(other)", "all others", "\u202eabc", "\u2066x\u2069", "\u200b", "\ufeff", "\x00",
    "\x1b[31mred",
    "a\nb", "a\r", "\u0001", "\ud7ff", "\U0010ffff", "é", "e\u0301", "日本", "👩‍👩‍👧", "a,b", 'a"b',
    "a'b", "`", "``", "[", "]", "a]b", "a[b]", "a:b", "a**2", "C(a)", "ns(a, 1, 2)", ".", "+", "-",
    "<script>alert(1)</script>", "{{7*7}}", "../../etc/passwd", "a" * 300,
)  # fmt: skip
LONG = "long " * 200_000  # 1 MB


def one_of(rng: Rng, choices: Sequence[T]) -> T:
    """Return one of some choices."""
    return choices[int(rng.integers(len(choices)))]


def text(rng: Rng) -> str:
    """Return a text, seldom one of 1 MB."""
    return LONG if rng.random() < 0.01 else one_of(rng, TEXTS)


def _kinds() -> tuple[Callable[[Rng, int], pl.Series], ...]:
    moment, day = datetime(2026, 3, 1, 12), date(2026, 3, 1)

    def whole(kind: Any) -> Callable[[Rng, int], pl.Series]:
        return lambda rng, n: pl.Series(rng.integers(0, 100, n)).cast(kind)

    def listed(values: Callable[[Rng, int], list[Any]], kind: Any = None) -> Any:
        return lambda rng, n: pl.Series(values(rng, n), dtype=kind)

    kinds = (pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt32, pl.UInt64, pl.Float32)
    return (
        *(whole(kind) for kind in kinds),
        whole(pl.Decimal(10, 2)),
        whole(pl.Duration("ms")),
        lambda rng, n: pl.Series(rng.normal(size=n)),
        lambda rng, n: pl.Series(rng.random(n) < 0.5),
        listed(lambda rng, n: [one_of(rng, TEXTS) for _ in range(n)], pl.String),
        listed(lambda rng, n: [f"level {k}" for k in range(n)], pl.String),
        listed(lambda rng, n: ["a"] * n, pl.Categorical),
        listed(lambda rng, n: [one_of(rng, ("a", "b")) for _ in range(n)], pl.Enum(["b", "a"])),
        listed(lambda rng, n: [day + timedelta(days=int(k)) for k in rng.integers(0, 9, n)]),
        listed(lambda rng, n: [moment] * n, pl.Datetime("ns")),
        listed(lambda rng, n: [moment] * n, pl.Datetime("us", "UTC")),
        listed(lambda rng, n: [time(3, 4)] * n),
        listed(lambda rng, n: [[1.0, 2.0]] * n),
        listed(lambda rng, n: [["a"], []] * (n // 2) + [None] * (n % 2)),
        listed(lambda rng, n: [[1, 2]] * n, pl.Array(pl.Int64, 2)),
        listed(lambda rng, n: [{"a": 1, "b": {"c": "x"}}] * n),
        listed(lambda rng, n: [b"\xff\x00"] * n),
        listed(lambda rng, n: [None] * n),
    )


KINDS = _kinds()


def series(rng: Rng, name: str, size: int) -> pl.Series:
    """Return a column of any type."""
    return one_of(rng, KINDS)(rng, size).alias(name)
