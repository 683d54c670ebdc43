"""The list of attacks, and those that have no file of their own.

=====================================================  ============================================
attack                                                 test
=====================================================  ============================================
headers and bytes of arrays, sizes, types, NaN         ``test_arrays``: replies_that_cannot_be_used
buffers: huge, negative, other types                   ``test_arrays``: one_client_moves_a_buffer
weights too large to add by                            ``test_arrays``: weights_too_large
metrics: not finite, renamed, tied                     ``test_arrays``: metric, tie
pickles, other formats, raising properties             here: bytes_that_are_no_arrays
orders and precisions of arrays                        here: other_layouts_of_the_same_numbers
metrics: huge numbers, counts, names                   here: metrics, names
errors of millions of characters, odd codes            here: errors_of_any_code_and_size
replies to other rounds, second replies                ``test_rounds``: answers_to_other_rounds
covariates: lies                                       ``test_covariates``: liars, share, range
covariates: huge, tiny, types, long texts, objects     ``test_covariates``: no_answer_ends, type
covariates: other types by round, integers, surrogates here: answers_of_any_kind
identifiers: long, control characters                  ``test_covariates``: what_clients_say_is_cut
identifiers: integers of thousands of digits           here: answers_of_any_kind
identifiers: somebody else's, several, in turn         ``test_identity``
new levels in every round                              ``test_levels``
fits that fail                                         ``test_covariates``: a_fit_that_fails
ledgers with poisoned covariates                       ``test_covariates``: poisoned_rows
ledgers changed in any other column                    here: a_ledger_changed_by_hand
clocks that go backwards                               here: a_clock_that_goes_backwards
answers too late, never, or wrong for everybody        ``test_preflight``
long updates                                           ``test_guards``, ``test_screen``
the model stays within the stated bound                here: the_model_stays_within_the_bound
=====================================================  ============================================
"""

import io
import json
import logging
import pickle
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from flwr.app import Array, Error, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg

from fedipw.errors import InputError
from fedipw.flower.screen import METRICS_MOST
from fedipw.tables import Ledger

from ..federations import INSIDE, Behaviour, Small, answered, theta, theta_of

ATTACKERS = (2, 5, 8)  # of twelve
HONEST = frozenset(range(INSIDE)) - {*ATTACKERS}


def pushed(message: Message, index: int = 0) -> Message:
    """Return an honest reply: along an axis of its own, and one that all share."""
    del index
    return answered(message, {"theta": theta(message) + step(message)}, loss=0.5)


def step(message: Message) -> Any:
    who = int(message.metadata.dst_node_id) - 100
    return np.array([1.0, np.cos(who), np.sin(who)])


def with_array(made: Callable[[Any], Array]) -> Behaviour:
    """Return a reply whose one array is made of the honest numbers."""

    def reply(message: Message, index: int) -> Message:
        found = pushed(message, index)
        found.content.array_records["arrays"]["theta"] = made(theta(message) + step(message))
        return found

    return reply


def attacked(where: Path, behaviours: dict[int, Behaviour], rounds: int = 2, **how: Any) -> Any:
    where.mkdir(exist_ok=True)
    small = Small(where, {**dict.fromkeys(range(INSIDE), pushed), **behaviours})
    settings: dict[str, Any] = {"refit_every": 1, "average": None, **how}
    small.trained(1, **settings)
    return small, small.trained(rounds, **settings)  # a restart reads what the attack left


def check_readable(small: Small, rounds: int) -> None:
    """Check that a ledger is whole, and that no file has a number that is not finite."""
    for directory in (small.where / "ledger", small.where / "ledger" / "evaluation"):
        if directory.exists():
            assert Ledger(directory).rounds in {(), tuple(range(1, rounds + 1))}
            for index in Ledger(directory).rounds:
                assert (Ledger(directory).read(index)["round"] == index).all()
    for path in small.where.rglob("*.json"):
        json.loads(path.read_text(), parse_constant=pytest.fail)


def check_honest_counted(small: Small, rounds: int) -> None:
    for index in range(1, rounds + 1):
        rows = small.round(index)
        assert all(rows[f"u{k}"]["replied"] for k in HONEST)
        assert max(len(row["fate"] or "") for row in rows.values()) < 250


# Arrays.


def saved(*, objects: bool) -> bytes:
    stream = io.BytesIO()
    if objects:
        np.save(stream, np.array([print, None, {}], dtype=object), allow_pickle=True)
    else:
        np.savez(stream, theta=np.ones(3))
    return stream.getvalue()


class Raising(Array):
    """An array that fails whenever it is looked at."""

    error: Exception = RuntimeError("\x1b[31m boo")

    def __init__(self) -> None:
        self.__dict__.update(dtype="float64", shape=(3,), stype="numpy.ndarray")

    @property
    def data(self) -> bytes:  # type: ignore[override]
        raise self.error


class Hungry(Raising):
    error = MemoryError("no room")


def bytes_are(data: Any, stype: Any = "numpy.ndarray") -> Callable[[Any], Array]:
    def made(values: Any) -> Array:
        array = Array(values)
        array.data, array.stype = data, stype
        return array

    return made


NO_ARRAYS: dict[str, Callable[[Any], Array]] = {
    "objects": bytes_are(saved(objects=True)),
    "archive": bytes_are(saved(objects=False)),
    "pickle": bytes_are(pickle.dumps(np.ones(3))),
    "bytes behind it": bytes_are(Array(np.ones(3)).data + bytes(8)),
    "half of it": bytes_are(Array(np.ones(3)).data[:-4]),
    "text": bytes_are("abc"),
    "millions of zeros": bytes_are(bytes(10_000_000)),
    "another format": bytes_are(Array(np.ones(3)).data, "torch.Tensor"),
    "no format": bytes_are(Array(np.ones(3)).data, None),
    "raising": lambda _: Raising(),
    "no memory": lambda _: Hungry(),
    "complex": lambda values: Array(values.astype(np.complex128)),
    "dates": lambda values: Array(values.astype("M8[s]")),
    "letters": lambda values: Array(values.astype("U9")),
    "of no dimension": lambda _: Array(np.array(1.0)),
    "one dimension more": lambda values: Array(values[None]),
    "empty": lambda values: Array(values[:0]),
    "the largest numbers": lambda values: Array(np.full_like(values, 1.7e308)),
}


@pytest.mark.parametrize(
    "names", [list(NO_ARRAYS)[k : k + 3] for k in range(0, len(NO_ARRAYS), 3)], ids=lambda n: n[0]
)
def test_bytes_that_are_no_arrays_are_refused_and_never_unpickled(
    tmp_path: Path, names: list[str]
) -> None:
    lies = {k: with_array(NO_ARRAYS[name]) for k, name in zip(ATTACKERS, names, strict=True)}
    small, result = attacked(tmp_path, lies, scheme="fedavg")
    for index in (1, 2):
        rows = small.round(index)
        for k, name in zip(ATTACKERS, names, strict=True):
            assert rows[f"u{k}"]["fate"].startswith("refused: "), name
    check_honest_counted(small, 2)
    check_readable(small, 2)
    assert theta_of(result.arrays)[0] == pytest.approx(2.0, rel=1e-12)


SAME: dict[str, Callable[[Any], Array]] = {
    "big-endian": lambda values: Array(values.astype(">f8")),
    "long double": lambda values: Array(values.astype(np.longdouble)),
    "another order": lambda values: Array(np.asfortranarray(values)),
}


@pytest.mark.parametrize("scheme", ["augmented", "fedipw", "fedvarp+fedipw"])
def test_other_layouts_of_the_same_numbers_give_the_same_model(tmp_path: Path, scheme: str) -> None:
    lies = {k: with_array(made) for k, made in zip(ATTACKERS, SAME.values(), strict=True)}
    _, plain = attacked(tmp_path / "plain", {}, scheme=scheme)
    small, odd = attacked(tmp_path / "odd", lies, scheme=scheme)
    assert all(row["fate"] == "replied" for row in small.round(2).values())
    np.testing.assert_allclose(theta_of(odd.arrays), theta_of(plain.arrays), rtol=1e-12)


# Metrics, in training and evaluation.


def telling(small: Small, metrics: dict[str, Any], who: Any = ATTACKERS) -> None:
    """Let some clients report these metrics beside the usual ones, whatever they are asked for."""
    plain = small.grid._reply

    def reply(message: Message) -> Message | None:
        found = plain(message)
        lies = int(message.metadata.dst_node_id) - 100 in who
        if found is not None and lies and found.has_content():
            for record in found.content.values():
                if isinstance(record, MetricRecord):
                    record.update(metrics)
        return found

    small.grid._reply = reply  # type: ignore[method-assign]


def evaluated(where: Path, metrics: dict[str, Any], who: Any = ATTACKERS) -> Any:
    """Train and evaluate two rounds, the second after a restart."""
    small = Small(where, dict.fromkeys(range(INSIDE), pushed))
    telling(small, metrics, who)
    result: Any = None
    for rounds in (1, 2):
        inner = FedAvg(min_train_nodes=1, min_available_nodes=1)
        result = small.trained(rounds, inner, scheme="fedipw-hajek", average=None)
    return small, result


@pytest.mark.parametrize(
    "metrics",
    [
        {"loss": 1e308}, {"loss": -1e200}, {"loss": 10**400}, {"num-examples": 1e308},
        {"num-examples": -1}, {"num-examples": float("nan")}, {"num-examples": [1.0] * 9},
    ],
    ids=lambda metrics: str(metrics)[:24],
)  # fmt: skip
def test_metrics_of_any_size_leave_the_interval_of_the_others(
    tmp_path: Path, metrics: dict[str, Any]
) -> None:
    small, result = evaluated(tmp_path, metrics)
    for index in (1, 2):
        told = result.evaluate_metrics_clientapp[index]
        assert 0.0 <= told["loss-target-low"] <= told["loss-target"] <= told["loss-target-high"]
        assert result.train_metrics_clientapp[index]["loss"] == pytest.approx(0.5)
    check_honest_counted(small, 2)
    check_readable(small, 2)


ODD_NAMES: dict[str, list[str]] = {
    "the directory above": [".."],
    "this directory": ["."],
    "nothing": [""],
    "long": ["x" * 300],
    "long when written": ["é" * 100],
    "half a pair": ["\ud800"],
    "ours": ["fedipw-weights"],
    "an interval": ["loss-target", "loss-target-se", "loss-target-low", "loss-target-high"],
    "a mean": ["loss-plain"],
    "many": [f"m{k}" for k in range(METRICS_MOST)],
}


@pytest.mark.parametrize("name", ODD_NAMES)
@pytest.mark.parametrize("everybody", [False, True])
def test_names_of_metrics_write_nowhere_else_and_replace_none_of_ours(
    tmp_path: Path, name: str, everybody: bool
) -> None:
    """Names are files of the evaluation; where all clients send one, nobody outvotes them."""
    who = range(INSIDE) if everybody else ATTACKERS
    small, result = evaluated(tmp_path, dict.fromkeys(ODD_NAMES[name], 7.0), who)
    check_readable(small, 2)
    for index in (1, 2):
        for k, row in small.round(index).items():
            assert row["fate"].startswith("refused: ") == (int(k[1:]) in who)
        told = result.evaluate_metrics_clientapp[index]
        assert told["fedipw-refused"] == len(who)
        if not everybody:
            assert told["loss-target"] != 7.0
    folder = tmp_path / "ledger" / "evaluation" / "metrics"
    kept = {path.name for path in folder.iterdir()} if folder.exists() else set()
    assert kept == (set() if everybody else {"loss"})


def test_names_that_are_unusual_and_harmless_are_used(tmp_path: Path) -> None:
    metrics = {"a/../../b": 1.0, "\x1b[2J\n": 2.0, "top-5 accuracy %": 3.0}
    small, result = evaluated(tmp_path, metrics, range(INSIDE))
    told = result.evaluate_metrics_clientapp[2]
    assert [told[f"{name}-plain"] for name in metrics] == [1.0, 2.0, 3.0]
    check_readable(small, 2)


# Errors.


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (2, "E" * 20_000_000), (2, "x\x1b[31m\nFedIPW: all is well\n" * 1000), (2, None),
        (-5, "below"), (2**31, "\x00" * 1_000_000), (0, ""),
    ],
    ids=["long", "lines", "none", "negative", "beyond", "zero"],
)  # fmt: skip
def test_errors_of_any_code_and_size_are_recorded_in_a_line(
    tmp_path: Path, code: int, reason: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(message: Message, index: int) -> Message:
        del index
        return Message(Error(code, reason), reply_to=message)

    with caplog.at_level(logging.INFO, "flwr"):
        small, _ = attacked(tmp_path, dict.fromkeys(ATTACKERS, failing))
    check_honest_counted(small, 2)
    check_readable(small, 2)
    for line in (r.getMessage() for r in caplog.records if r.name == "flwr.fedipw"):
        assert len(line) < 1000
        assert "\x1b" not in line
        assert "\n" not in line.strip()


# What clients say of themselves.


ANSWERS: list[dict[str, Any]] = [
    *({"battery": value} for value in (10**400, -(10**5000), 2**63, 5e-324, "\ud800")),
    *({"unit_id": value} for value in (10**5000, -(2**70), "\ud800", "u2 ", "", b"u2")),
]


@pytest.mark.parametrize("told", ANSWERS, ids=lambda told: next(iter(told)))
def test_answers_of_any_kind_leave_the_others_in_the_round(
    tmp_path: Path, told: dict[str, Any]
) -> None:
    small = Small(tmp_path, told=dict.fromkeys(ATTACKERS, told))
    small.trained(1, refit_every=1)
    small.trained(2, refit_every=1)
    check_honest_counted(small, 2)
    check_readable(small, 2)


def test_types_that_change_by_round_leave_a_client_out_when_they_are_others(tmp_path: Path) -> None:
    small, said = Small(tmp_path), [0.1, "x", True, b"y", 0.2]
    for index, value in enumerate(said, start=1):
        small.told = {k: {"battery": value} for k in ATTACKERS}
        small.trained(index, refit_every=1)
        for k in ATTACKERS:
            assert small.round(index)[f"u{k}"]["replied"] == (type(value) is float)
    check_honest_counted(small, len(said))


# Ledgers and clocks.


def put(column: str, value: Any) -> Callable[[pl.DataFrame], pl.DataFrame]:
    def change(table: pl.DataFrame) -> pl.DataFrame:
        there = pl.when(unit_id="u3").then(pl.lit(value, dtype=table.schema[column]))
        return table.with_columns(there.otherwise(column).alias(column))

    return change


MOMENT = datetime(1, 1, 1, tzinfo=UTC)
CHANGED: dict[str, tuple[Callable[[pl.DataFrame], pl.DataFrame], str]] = {
    "round": (put("round", 99), "column 'round' holds 99"),
    "unknown": (put("unit_id", "nobody"), "not enrolled"),
    "twice": (put("unit_id", "u4"), "unit_id u4 stands more than once"),
    "nobody": (put("unit_id", None), "have no unit_id"),
    "invited": (put("invited", None), "'invited' must be true or false"),
    "replied": (put("replied", None), "'replied' must be true or false"),
    "available": (put("available", False), "invited without being available"),
    "probability": (put("invite_prob", float("nan")), "'invite_prob' must lie in"),
    "moment": (put("opened_at", MOMENT), "'opened_at' must hold one date"),
    "type": (lambda t: t.with_columns(battery=pl.lit("x")), "column 'battery' is String"),
    "column": (lambda t: t.drop("battery"), "other columns than"),
    "rows": (lambda t: t.head(0), "have no row"),
    "fate": (put("fate", "\x1b" * 1_000_000), ""),
    "tiny": (put("battery", 5e-324), ""),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_ledger_changed_by_hand_is_named_or_read_without_the_value(
    tmp_path: Path, name: str
) -> None:
    """Columns that the server writes itself are not clients' to poison: changes are errors."""
    change, words = CHANGED[name]
    small, _ = attacked(tmp_path, {}, rounds=3, scheme="fedipw")
    path = tmp_path / "ledger" / "round-000002.parquet"
    change(pl.read_parquet(path)).write_parquet(path)
    if words:
        with pytest.raises(InputError, match="(?s)round[- ]0*2.*" + words):
            small.trained(4, refit_every=1, average=None, scheme="fedipw")
        return
    found = small.trained(4, refit_every=1, average=None, scheme="fedipw")
    assert found.train_metrics_clientapp[4]["fedipw-weighed"] == INSIDE


def test_a_clock_that_goes_backwards_is_recorded_as_it_is(tmp_path: Path) -> None:
    small, years = Small(tmp_path), [2026, 2020, 1970]
    for index, year in enumerate(years, start=1):
        small.trained(index, clock=lambda year=year: datetime(year, 1, 1, tzinfo=UTC))
    for index, year in enumerate(years, start=1):
        assert small.round(index)["u0"]["opened_at"].year == year


# The bound.


@pytest.mark.parametrize("scheme", [None, "fedipw-hajek", "fedavg"])
def test_the_model_stays_within_the_bound_of_every_round(tmp_path: Path, scheme: Any) -> None:
    """Three of twelve lie about their state and push as far as they can, in the last round too.

    In each round the honest replies are the same in both runs, and so are the weights: the liars
    say the same of themselves. What their updates do to a round is bounded by ``fedipw-influence``
    for each of them, as the log says at the start.
    """
    last, ends, told = 3, [], {}
    for name in ("still", "pushing"):

        def lying(message: Message, index: int, name: str = name) -> Message:
            push = np.array([0.0, 0.0, 1e5]) if name == "pushing" and index == last else 0.0
            return answered(message, {"theta": theta(message) + push}, loss=0.5)

        small = Small(tmp_path, dict.fromkeys(range(INSIDE), pushed))
        small.told = {k: {"battery": -1e6 * k} for k in ATTACKERS}
        small.behaviours |= dict.fromkeys(ATTACKERS, lying)
        ledger = tmp_path / name
        result = small.trained(last, scheme=scheme, average=None, refit_every=1, ledger=ledger)
        ends.append(theta_of(result.arrays))
        told = result.train_metrics_clientapp[last]
    moved = float(np.linalg.norm(ends[1] - ends[0]))
    assert told["fedipw-clipped"] == len(ATTACKERS)
    assert 0.0 < moved <= len(ATTACKERS) * told["fedipw-influence"] * (1.0 + 1e-9)
    assert told["fedipw-influence"] <= 10.0 * np.sqrt(2.0) * told["fedipw-weight-largest"] + 1e-9
