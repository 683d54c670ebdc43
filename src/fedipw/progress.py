"""Progress of long work in Python: one line on the error stream, as notebooks show it too."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_PATIENCE: Final = 2.0  # seconds before anything is shown where nobody asked
_EVERY: Final = 0.2  # seconds between two looks


@contextmanager
def shown_progress(
    what: str, wanted: bool | None = None
) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a function of how many are done, and of how many; none if nothing is to be shown.

    ``wanted`` shows it from the start, or never; by default a notebook shows it after two seconds.

    >>> with shown_progress("rounds", wanted=False) as step:
    ...     step is None
    True
    """
    if wanted is False or (wanted is None and "ipykernel" not in sys.modules):
        yield None
        return
    began, last, drawn = time.monotonic(), 0.0, 0
    patience = 0.0 if wanted else _PATIENCE

    def step(done: int, total: int) -> None:
        nonlocal last, drawn
        now = time.monotonic()
        if now - began < patience or (now - last < _EVERY and done < total):
            return
        left = (now - began) * (total - done) / max(done, 1)
        line = f"{what} {done} of {total}" + (f", about {left:.0f} s left" if done < total else "")
        print("\r" + line.ljust(drawn), end="", file=sys.stderr, flush=True)
        last, drawn = now, max(drawn, len(line))

    try:
        yield step
    finally:
        if drawn:
            print(file=sys.stderr)
