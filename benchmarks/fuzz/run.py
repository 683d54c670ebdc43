"""Running cases in this process, each in a directory of its own and within a time limit."""

from __future__ import annotations

import io
import re
import shutil
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from types import FrameType
from typing import Any

import numpy as np

from benchmarks.fuzz import oracle
from benchmarks.fuzz.cases import Case, case_of

LIMIT = 20  # seconds of processor time, whatever else the machine does
WAIT = 6 * LIMIT  # seconds by the clock, for what waits for ever
_TRACE = re.compile(r"traceback is in (\S+traceback\.txt)")


class TimedOut(BaseException):
    """A case took longer than the limit."""


def called(*arguments: object) -> tuple[int, str, str]:
    """Return exit code, output and errors of a command run in this process."""
    from fedipw.cli import main

    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["fedipw", *map(str, arguments)]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
        code = 0
    except SystemExit as done:
        code = int(done.code or 0)
    finally:
        sys.argv = before
    return code, out.getvalue(), err.getvalue()


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """End what takes longer with an error; work in C is ended when it returns."""

    def over(_: int, __: FrameType | None) -> None:
        raise TimedOut

    clocks = {
        signal.SIGPROF: (signal.ITIMER_PROF, seconds),
        signal.SIGALRM: (signal.ITIMER_REAL, WAIT),
    }
    before = {kind: signal.signal(kind, over) for kind in clocks}
    for clock, most in clocks.values():
        signal.setitimer(clock, most)
    try:
        yield
    finally:
        for kind, (clock, _) in clocks.items():
            signal.setitimer(clock, 0)
            signal.signal(kind, before[kind])


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A case that did what it should not."""

    case: int
    kind: str
    about: str
    why: str
    arguments: str


@dataclass(kw_only=True)
class Result:
    """What some cases did."""

    seed: int
    cases: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    seconds: float = 0.0
    faults: list[Fault] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            **asdict(self),
            "kinds": dict(self.kinds),
            "codes": dict(sorted(self.codes.items())),
        }


def run_case(seed: int, index: int, result: Result, *, keep: bool = False) -> None:
    """Run one case and add what it did."""
    rng, root = np.random.default_rng([seed, index]), Path(mkdtemp(prefix="fuzz-"))
    try:
        case = case_of(rng, root)
        started, faults = time.process_time(), list[str]()
        try:
            with limited(LIMIT), warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                code = _judged(case, root, faults)
            told = [w for w in heard if not issubclass(w.category, DeprecationWarning)]
            faults += [f"warning: {w.message} at {w.filename}:{w.lineno}" for w in told]
        except TimedOut:
            code = "timed out"
            faults.append(f"longer than {LIMIT} s")
        took = time.process_time() - started
        if took > LIMIT and code != "timed out":
            faults.append(f"{took:.1f} s, longer than {LIMIT} s")
        result.cases += 1
        result.kinds[case.kind] += 1
        result.codes[str(code)] += 1
        result.slowest = max(result.slowest, took)
        shown = " ".join(str(a)[:80].replace(str(root), ".") for a in case.arguments)
        for why in dict.fromkeys(faults):
            about = case.about[:300]
            result.faults.append(
                Fault(case=index, kind=case.kind, about=about, why=why[:700], arguments=shown)
            )
    finally:
        if keep:
            print(f"case {index} is in {root}")
        else:
            shutil.rmtree(root, ignore_errors=True)


def _judged(case: Case, root: Path, faults: list[str]) -> str:
    """Run a case, add its faults and return how it ended."""
    if case.direct is not None:
        return _direct(case, faults)
    before = oracle.contents(root)
    code, out, err = called(*case.arguments)
    faults += oracle.ending(code, err)
    if found := _TRACE.search(err):
        path = Path(found[1])
        faults[:] = [f"{fault}\n{_last_lines(path.read_text())}" for fault in faults]
        path.unlink()
    faults += oracle.files(before, oracle.contents(root), case.outputs, code)
    if code == 0 and case.judge is not None:
        try:
            faults += case.judge(root, out, called)
        except (Exception, pl_panic()) as error:
            faults.append(
                f"the result cannot be judged: {type(error).__name__}: {str(error)[:300]}"
            )
    return str(code)


def pl_panic() -> type[BaseException]:
    """Return the error of polars that is no Exception."""
    import polars as pl

    return pl.exceptions.PanicException


def _direct(case: Case, faults: list[str]) -> str:
    from fedipw.errors import FedIPWError

    assert case.direct is not None
    try:
        case.direct()
    except FedIPWError:
        return "refused"
    except TimedOut:
        raise
    except BaseException as error:
        faults.append(f"{type(error).__name__}: {str(error)[:300]}")
        return "raised"
    return "0"


def _last_lines(text: str) -> str:
    lines = [line for line in text.split("\n") if "src/fedipw" in line or "Error" in line[:60]]
    return "\n".join(lines[-4:])
