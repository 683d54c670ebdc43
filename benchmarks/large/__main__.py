"""``python -m benchmarks.large write|run|cluster|peers|table``: large populations, long ledgers.

``write`` makes a population of 20 million, of whom 200,000 are enrolled, and ledgers of 50, 250
and 500 rounds: 10, 50 and 100 million rows. ``run`` measures weights, evaluations and audits on
them, ``cluster`` the same on a Dask cluster of two workers of which one is killed in each command,
``peers`` other packages on the same files. ``table`` writes the docs' tables from what was saved
in benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.large import agreement, cluster, commands, peers, tables, workload
from fedipw.lab.files import environment

RESULTS = Path(__file__).parents[1] / "results"
TABLE = Path(__file__).parents[2] / "docs" / "_static" / "large-benchmark.md"
DATA = Path("/tmp/fedipw-large")


def main(words: Sequence[str] | None = None) -> None:
    arguments = _parser().parse_args(words)
    arguments.part(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.large")
    parts = parser.add_subparsers(required=True)
    default = workload.Size()

    made = parts.add_parser("write", help="write population, ledgers and metrics")
    made.add_argument("--clients", type=int, default=default.clients)
    made.add_argument("--enrolled", type=int, help="1%% of the clients unless given")
    made.add_argument("--rounds", type=int, default=default.rounds)
    made.set_defaults(part=_write)

    run = parts.add_parser("run", help="measure the commands")
    run.set_defaults(part=_run, out=RESULTS / "large.json")

    spread = parts.add_parser("cluster", help="measure them on a cluster that loses a worker")
    spread.add_argument("--kill-at", type=float, default=0.3, help="share of the time alone")
    spread.set_defaults(part=_cluster, out=RESULTS / "large-cluster.json")

    beside = parts.add_parser("peers", help="measure other packages on the same files")
    beside.add_argument("--environments", type=Path, default=Path("/tmp/fedipw-large-peers"))
    beside.add_argument("--balance-clients", type=int, nargs="*", default=[200_000, 1_000_000])
    both = ("weights", "balance")
    beside.add_argument("--parts", nargs="*", choices=both, default=both)
    beside.add_argument("--gigabytes", type=float, default=16.0, help="a process may hold")
    beside.add_argument("--seconds", type=float, default=600.0, help="a process may take")
    beside.set_defaults(part=_peers, out=RESULTS / "large-peers.json")

    for part in (run, spread, beside):
        part.add_argument("--rounds", type=int, nargs="*", help="ledgers; all unless given")
        part.add_argument("--memory", help="limit given to the commands, such as 3GB")
        part.add_argument("--busy", action="store_true", help="say that others use the machine")
        part.add_argument("--out", type=Path)
    for part in (run, spread):
        part.add_argument("--commands", nargs="*", default=[], help="first words of their names")
    for part in (made, run, spread, beside):
        part.add_argument("--data", type=Path, default=DATA)

    shown = parts.add_parser("table", help="write the docs' tables from saved results")
    shown.add_argument("--results", type=Path, default=RESULTS)
    shown.add_argument("--out", type=Path, default=TABLE)
    shown.set_defaults(part=_table)
    return parser


def _write(arguments: argparse.Namespace) -> None:
    if workload.logs(arguments.data):
        raise SystemExit(f"{arguments.data} holds ledgers already: remove it, or name another.")
    clients = arguments.clients
    enrolled = arguments.enrolled or clients // 100
    size = workload.Size(clients=clients, enrolled=enrolled, rounds=arguments.rounds)
    print(f"{workload.write(arguments.data, size):,} of {clients:,} clients are enrolled.")


def _run(arguments: argparse.Namespace) -> None:
    facts = _facts(arguments)

    def save(rows: list[dict[str, Any]]) -> None:
        _save(arguments.out, {**facts, "runs": rows, "growth": commands.growth(rows)})

    chosen = commands.chosen(arguments.commands)
    commands.run(_logs(arguments), chosen, arguments.data / "out", _more(arguments), save)


def _cluster(arguments: argparse.Namespace) -> None:
    facts = {**_facts(arguments), "kill_at": arguments.kill_at, "tolerance": agreement.TOLERANCE}
    rows: list[dict[str, Any]] = []
    for log in _logs(arguments):
        for row in cluster.run(
            log, commands.chosen(arguments.commands), arguments.data / "out", arguments.kill_at,
            _more(arguments),
        ):  # fmt: skip
            rows.append(row)
            print(row, flush=True)
            _save(arguments.out, {**facts, "runs": rows})
    wrong = [row["command"] for row in rows if not row["equal"] or row["killed"] is None]
    if wrong:
        raise SystemExit(f"Not equal, or no worker killed: {', '.join(wrong)}.")


def _peers(arguments: argparse.Namespace) -> None:
    limits = peers.Limits(gigabytes=arguments.gigabytes, seconds=arguments.seconds)
    pythons, place = peers.Environments(arguments.environments), arguments.data / "peers"
    logs, sizes, more = _logs(arguments), arguments.balance_clients, _more(arguments)
    parts = {
        "weights": peers.weights(logs, pythons, place, limits, more),
        "balance": peers.balanced(arguments.data, sizes, pythons, place, limits),
    }
    # a part that is not asked for stays as it was saved
    former = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    found: dict[str, Any] = {part: former.get(part, []) for part in parts}
    found |= {**_facts(arguments), "limits": limits.to_json(), "threads": peers.threads()}
    for part in arguments.parts:
        found[part] = []
        for row in parts[part]:
            found[part].append(row)
            print(row, flush=True)
            _save(arguments.out, found)


def _table(arguments: argparse.Namespace) -> None:
    arguments.out.write_text(tables.text(arguments.results), encoding="utf-8")


def _logs(arguments: argparse.Namespace) -> list[workload.Log]:
    there = workload.logs(arguments.data)
    found = [log for log in there if not arguments.rounds or log.length in arguments.rounds]
    if not found:
        lengths = ", ".join(str(log.length) for log in there) or "none"
        raise SystemExit(f"No such ledger in {arguments.data}: there are {lengths}.")
    return found


def _more(arguments: argparse.Namespace) -> list[str]:
    return ["--memory", arguments.memory] if arguments.memory else []


def _facts(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        **workload.counts(arguments.data),
        "truth": workload.TRUTH,
        "memory": arguments.memory,
        "busy": arguments.busy,
    }


def _save(path: Path, found: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found | environment(), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
