"""The docs' tables of saved results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def text(results: Path) -> str:
    """Return the tables of those results that are saved, each below what it shows."""
    parts: dict[str, Callable[[Row], Iterator[str]]] = {
        "large.json": _alone,
        "large-cluster.json": _cluster,
        "large-peers.json": _peers,
    }
    found = []
    for name, part in parts.items():
        path = results / name
        if path.exists():
            saved = json.loads(path.read_text(encoding="utf-8"))
            found.append("\n".join(part(saved)))
            if saved["busy"]:
                found.append("Others used the machine: compare processor seconds, not seconds.")
    return "\n\n".join(found) + "\n"


def _alone(saved: Row) -> Iterator[str]:
    limit = f", with `--memory {saved['memory']}`" if saved["memory"] else ""
    yield f"**On one machine**, {_population(saved)}{limit}:"
    yield ""
    yield from _head(
        "command", "rows of the ledger", "seconds", "per million rows", "processor seconds",
        "peak GB", "slope ratio",
    )  # fmt: skip
    for name, grown in saved["growth"].items():
        own = [row for row in saved["runs"] if row["command"] == name]
        slope = grown["slope_ratio"]
        for row in own:
            last = row is own[-1] and slope is not None
            yield _line(
                name, _whole(row["rows"]), _short(row["seconds"]),
                f"{row['seconds'] / (row['rows'] / 1e6):.2f}", _short(row["processor_seconds"]),
                f"{row['gigabytes']:.2f}", f"{slope:.2f}" if last else "",
            )  # fmt: skip
    yield ""
    yield "The slope ratio is the time that a row adds from the second ledger to the third, over"
    yield "that from the first to the second: 1 is linear."


def _cluster(saved: Row) -> Iterator[str]:
    limit = f", with `--memory {saved['memory']}`" if saved["memory"] else ""
    yield (
        "**On a Dask cluster** of two workers with one thread each, of which one is killed in each "
        f"command, {_population(saved)}{limit}:"
    )
    yield ""
    yield from _head(
        "command", "rows of the ledger", "seconds", "alone", "killed after", "GB of the command",
        "of a worker", "of all", "largest difference",
    )  # fmt: skip
    for row in saved["runs"]:
        peak, killed = row["peak_gigabytes"], row["killed"]
        yield _line(
            row["command"], _whole(row["rows"]), _short(row["seconds"]),
            _short(row["local_seconds"]),
            "not killed" if killed is None else f"{_short(killed['seconds'])} s",
            f"{row['driver_gigabytes']:.2f}", f"{peak['largest worker']:.2f}",
            f"{peak['all']:.2f}", _apart(row["largest_difference"]),
        )  # fmt: skip


def _peers(saved: Row) -> Iterator[str]:
    limits = saved["limits"]
    yield (
        f"**Pooled weights by hand**, polars with another package, {_population(saved)}; at most "
        f"{limits['gigabytes']:g} GB and {limits['seconds']:g} s:"
    )
    yield ""
    yield from _head(
        "package", "rows of the ledger", "seconds", "processor seconds", "peak GB",
        "weights differ by",
    )  # fmt: skip
    for row in saved["weights"]:
        yield _line(_named(row), _whole(row["rows"]), *_used(row))
    if not saved["balance"]:
        return
    yield ""
    yield "**Weights of enrolled clients alone**, by balance:"
    yield ""
    yield from _head(
        "package", "clients", "enrolled", "seconds", "processor seconds", "peak GB",
        "weights differ by", "ASMD", "effective clients",
    )  # fmt: skip
    for row in saved["balance"]:
        if "ended" in row:
            yield _line(_named(row), _whole(row["clients"]), "", *_used(row), "", "")
            continue
        yield _line(
            _named(row), _whole(row["clients"]), _whole(row["enrolled"]), *_used(row),
            f"{row['asmd_before']:.3f} to {row['asmd']:.4f}", _whole(round(row["effective"])),
        )  # fmt: skip


def _population(saved: Row) -> str:
    return f"{saved['clients']:,} clients, {saved['enrolled']:,} of them enrolled"


def _named(row: Row) -> str:
    name, *settings = row["package"].split(", ")
    shown = f"{name} {row['version']}" if "version" in row else name
    return ", ".join([shown, *settings])


def _used(row: Row) -> tuple[str, str, str, str]:
    if "ended" in row:
        return f"ended after {row['seconds']:.0f}, limit of {row['ended']}", "", "", ""
    differs = row.get("largest_difference")
    shown = "" if differs is None or row["package"] == "fedipw" else _apart(differs)
    processor = _short(row["processor_seconds"])
    return _short(row["seconds"]), processor, f"{row['gigabytes']:.2f}", shown


def _apart(size: float) -> str:
    return f"{size:.0e}" if size < 0.01 else f"{100 * size:.0f}%"


def _short(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.1f}"


def _whole(number: float) -> str:
    return f"{number:,}"


def _head(first: str, *others: str) -> Iterator[str]:
    yield _line(first, *others)
    yield "|---|" + "---:|" * len(others)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
