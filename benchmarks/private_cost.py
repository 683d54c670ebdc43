"""What a private round costs: messages, bytes and seconds, by the number of clients.

``python -m benchmarks.private_cost`` leads rounds of 20 to 200 clients through the protocol in one
process, with 5 and 20 balance columns and a model of 100,000 parameters, one fifth of the clients
lost before their masked vectors, and saves what each part took. Seconds of a client are the mean
over clients; in a deployment they run at the same time. Training itself is not in it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fedipw.lab.files import environment
from fedipw.private.calibration import BalanceMap, RoundTerms, RoundTotals, TermLimits
from fedipw.private.protocol import Member, SumServer, Wire
from fedipw.private.sums import contribution_words

RESULTS = Path(__file__).parent / "results" / "private_cost.json"
SIZES, COLUMNS, PARAMETERS = (20, 50, 100, 200), (5, 20), 100_000
LOST = 0.2
T = TypeVar("T")


class Meter:
    """Seconds and bytes by who spends them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.bytes: dict[str, int] = defaultdict(int)
        self.messages = 0

    def timed(self, who: str, work: Callable[[], T]) -> T:
        began = time.perf_counter()
        out = work()
        self.seconds[who] += time.perf_counter() - began
        return out

    def sent(self, way: str, message: Wire) -> None:
        self.messages += 1
        self.bytes[way] += sum(
            sum(len(v) if isinstance(v, bytes) else 8 for v in value)
            if isinstance(value, list)
            else len(value) if isinstance(value, bytes | str) else 8
            for value in message.to_plain().values()
        )  # fmt: skip


def terms_of(columns: int, parameters: int) -> RoundTerms:
    names = tuple(f"z{j}" for j in range(columns))
    balance = BalanceMap(names=names, mean=np.zeros(columns), scale=np.ones(columns))
    limits = TermLimits(clip=1.0)
    return RoundTerms(
        balance=balance, coefficients=np.full(columns, 0.05), unit=1.0, limits=limits,
        parameters=parameters,
    )  # fmt: skip


def round_cost(clients: int, columns: int, parameters: int, seed: int = 0) -> dict[str, Any]:
    """Return what one round took; its sum is checked against the plain one."""
    rng, terms, meter = np.random.default_rng(seed), terms_of(columns, parameters), Meter()
    server = SumServer(terms.request, minimum=min(10, clients // 2), asked=clients)
    vectors = {}
    for i in range(clients):
        b, update = rng.standard_normal(columns), rng.standard_normal(parameters)
        update /= 2.0 * np.linalg.norm(update)
        vectors[i] = meter.timed("client", partial(terms.contribution, 1.0, b, update))
    members: dict[int, Member] = {}
    keys, boxes, masked, shares = {}, {}, {}, {}
    for i in vectors:
        meter.sent("down", server.invitation)
        members[i], keys[i] = meter.timed("client", lambda: Member.begun(server.invitation))
        meter.sent("up", keys[i])
    near = meter.timed("server", lambda: server.keys(keys))
    for i, told in near.items():
        meter.sent("down", told)
        members[i], boxes[i] = meter.timed("client", partial(members[i].shared, told))
        meter.sent("up", boxes[i])
    carried = meter.timed("server", lambda: server.boxes(boxes))
    there = sorted(carried)[int(LOST * clients) :]
    for i in there:
        meter.sent("down", carried[i])

        def masks(i: int = i) -> Any:
            words = contribution_words(vectors[i], terms.request, members[i].code())
            return members[i].masked(carried[i], words)

        members[i], masked[i] = meter.timed("client", masks)
        meter.sent("up", masked[i])
    opening = meter.timed("server", lambda: server.masked(masked))
    for i, asked in opening.items():
        meter.sent("down", asked)
        shares[i] = meter.timed("client", partial(members[i].opened, asked))
        meter.sent("up", shares[i])
    found = meter.timed("server", lambda: server.shares(shares))
    exact = np.sum([vectors[i] for i in there], axis=0)
    assert np.abs(found.total - exact).max() <= found.error
    assert not RoundTotals.of(terms, found).fault(terms)
    assert server.graph is not None
    return {
        "clients": clients, "columns": columns, "parameters": parameters,
        "neighbours": server.graph.degree, "threshold": server.graph.threshold,
        "contributors": found.contributors, "messages": meter.messages,
        "bytes_up_per_client": meter.bytes["up"] / clients,
        "bytes_down_per_client": meter.bytes["down"] / clients,
        "seconds_per_client": meter.seconds["client"] / clients,
        "seconds_server": meter.seconds["server"],
    }  # fmt: skip


def table(rounds: Sequence[dict[str, Any]]) -> list[str]:
    """Return the rows of the table in docs/private.md."""
    head = (
        "clients", "balance columns", "neighbours", "messages", "kB up a client",
        "kB down a client", "seconds a client", "seconds at the server",
    )  # fmt: skip
    rows = [
        (
            f"{r['clients']}", f"{r['columns']}", f"{r['neighbours']}", f"{r['messages']:,}",
            f"{r['bytes_up_per_client'] / 1e3:.0f}", f"{r['bytes_down_per_client'] / 1e3:.1f}",
            f"{r['seconds_per_client']:.2f}", f"{r['seconds_server']:.1f}",
        )
        for r in rounds
    ]  # fmt: skip
    lines = [head, ("---",) * len(head), *rows]
    return [f"| {' | '.join(line)} |".replace("| --- ", "|---").replace("--- |", "---|")
            for line in lines]  # fmt: skip


def main(sizes: Sequence[int], columns: Sequence[int], parameters: int, out: Path | None) -> None:
    found = []
    for q in columns:
        for n in sizes:
            made = round_cost(n, q, parameters)
            print(
                f"{n:4d} clients, q = {q:2d}: {made['neighbours']} neighbours, "
                f"{made['messages']} messages, {made['bytes_up_per_client'] / 1e3:.0f} kB up and "
                f"{made['bytes_down_per_client'] / 1e3:.0f} kB down a client, "
                f"{made['seconds_per_client']:.2f} s a client, {made['seconds_server']:.2f} s "
                "at the server",
                flush=True,
            )
            found.append(made)
    print("\n".join(table(found)))
    if out is not None:
        saved = {"environment": environment(), "lost": LOST, "rounds": found}
        out.write_text(json.dumps(saved, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--columns", type=int, nargs="+", default=COLUMNS)
    parser.add_argument("--parameters", type=int, default=PARAMETERS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    main(given.sizes, given.columns, given.parameters, given.out)
