"""A memory of every client on a server: files, sums, enrollment that changes, hostile replies."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from flwr.app import Array, ArrayRecord, Message
from flwr.serverapp.strategy import FedAdam, FedAvg, Strategy

from fedipw.combining.memory import MemoryWeights
from fedipw.errors import InputError
from fedipw.flower import FedIPW, GaussianNoise, Screen, declined
from fedipw.numerics import FloatArray
from fedipw.weighting.weigher import StagedEnrollment

from .federations import INSIDE, Small, answered, theta
from .test_augmentation import busy, bytes_of, goal, made, pulled

QUIET: dict[str, Any] = {"fraction_evaluate": 0.0, "min_train_nodes": 1, "min_available_nodes": 1}
INNER: dict[str, Callable[[], Strategy]] = {
    "FedAvg": lambda: FedAvg(**QUIET),
    "FedAdam": lambda: FedAdam(eta=0.1, **QUIET),
}
UPDATES = ("efficient", "efficient-hajek", "mifa+efficient", "fedvarp+fedipw-hajek")
ROUNDS = 8
EXACT = 1e-13  # sums of a dozen numbers of order one


def files(small: Small) -> dict[str, FloatArray]:
    """Return what is in the store, by the names of its files."""
    folder = small.where / "ledger" / "checkpoint" / "memory"
    return {path.name: np.load(path) for path in sorted(folder.iterdir())}


def kept(small: Small) -> tuple[dict[int, FloatArray], FloatArray]:
    """Return what is kept of each client, by row, and the sum; one file each, and no others."""
    found = files(small)
    clients = {}
    for name in found:
        match = re.fullmatch(r"(\d{6})-\d{6}\.npy|sum-\d{6}\.npy", name)
        assert match, name
        if match[1]:
            assert int(match[1]) not in clients
            clients[int(match[1])] = found[name]
    (total,) = [array for name, array in found.items() if name.startswith("sum")]
    return clients, total


def omega_of(strategy: FedIPW, index: int) -> FloatArray:
    """Return enrollment weights in a round, found anew."""
    stage, method = strategy.config.stage, strategy.config.plan.method
    moment = strategy._clock()
    present = stage.members.present(index, moment)
    state = StagedEnrollment(stage, method).at(present)
    return MemoryWeights.of(method.at(state)).enrollment_weights


def direct(clients: dict[int, FloatArray], omega: FloatArray) -> FloatArray:
    """Return the sum over the store."""
    out: FloatArray = sum((omega[row] * v.astype(float) for row, v in clients.items()), np.zeros(3))
    return out


def run(small: Small, rounds: int, scheme: str, inner: str = "FedAvg", **more: Any) -> FedIPW:
    strategy = small.strategy(INNER[inner](), scheme=scheme, **more)
    small.result = strategy.start(small.grid, small.start, num_rounds=rounds)  # type: ignore[attr-defined]
    return strategy


@pytest.mark.parametrize("scheme", UPDATES)
def test_files_are_the_latest_updates_and_their_sum(tmp_path: Path, scheme: str) -> None:
    small = made(tmp_path, "a")
    before = small.start["theta"].numpy()
    rows = small.people.filter(pl.int_range(pl.len()) < INSIDE)["unit_id"].to_list()
    expected: dict[int, FloatArray] = {}
    for index in range(1, 5):
        strategy = run(small, index, scheme, average=None)
        for k in range(INSIDE):
            if not busy(k, index):
                expected[rows.index(f"u{k}")] = (goal(k) - before) / 3.0
        clients, total = kept(small)
        assert clients.keys() == expected.keys()
        for row, vector in expected.items():
            np.testing.assert_allclose(clients[row], vector, rtol=0.0, atol=EXACT)
        omega = omega_of(strategy, index)
        np.testing.assert_allclose(total, direct(clients, omega), rtol=0.0, atol=EXACT)
        after = small.result.arrays["theta"].numpy()  # type: ignore[attr-defined]
        if scheme.startswith("mifa"):
            np.testing.assert_allclose(after - before, total, rtol=0.0, atol=EXACT)
        before = after
        metrics = small.result.train_metrics_clientapp[index]  # type: ignore[attr-defined]
        assert metrics["fedipw-memory-clients"] == len(expected)
        share = omega[list(expected)].sum()
        assert metrics["fedipw-memory-weight"] == pytest.approx(share, rel=1e-12)


@pytest.mark.parametrize(
    ("scheme", "inner"), [*((s, "FedAvg") for s in UPDATES), ("efficient", "FedAdam")]
)
def test_a_stopped_run_goes_on_to_the_same_bytes(tmp_path: Path, scheme: str, inner: str) -> None:
    whole, parts = made(tmp_path, "whole"), made(tmp_path, "parts")
    run(whole, ROUNDS, scheme, inner)
    for rounds in (1, 4, ROUNDS):
        run(parts, rounds, scheme, inner)
    assert bytes_of(parts.result) == bytes_of(whole.result)  # type: ignore[attr-defined]
    one, two = files(whole), files(parts)
    assert one.keys() == two.keys()
    assert all(one[name].tobytes() == two[name].tobytes() for name in one)


def test_the_memory_moves_the_model_and_not_the_weights(tmp_path: Path) -> None:
    results = {}
    for scheme in ("efficient", "efficient, augmentation=none"):
        small = made(tmp_path, scheme)
        run(small, ROUNDS, scheme)
        results[scheme] = small.result  # type: ignore[attr-defined]
    one, two = results.values()
    for index in range(1, ROUNDS + 1):
        weights = [r.train_metrics_clientapp[index]["fedipw-weights"] for r in (one, two)]
        assert weights[0] == weights[1]
    apart = one.arrays["theta"].numpy() - two.arrays["theta"].numpy()
    assert np.abs(apart).max() > 1e-3
    assert not (tmp_path / "efficient, augmentation=none" / "ledger/checkpoint/memory").exists()


@pytest.mark.parametrize("scheme", UPDATES)
def test_float32_is_kept_in_float32_and_half_precision_in_single(
    tmp_path: Path, scheme: str
) -> None:
    """Updates of order 1 in float32 over 8 rounds err by some 1e-6; 1e-4 is far above that."""
    found = {}
    for dtype in (np.float16, np.float32, np.float64):
        small = made(tmp_path, np.dtype(dtype).name, dtype)
        run(small, ROUNDS, scheme)
        clients, total = kept(small)
        wide = max(np.dtype(dtype), np.dtype(np.float32))
        assert {v.dtype for v in clients.values()} == {wide}
        assert total.dtype == np.float64
        found[dtype] = small.result.arrays["theta"].numpy()  # type: ignore[attr-defined]
        assert found[dtype].dtype == dtype
    np.testing.assert_allclose(found[np.float32], found[np.float64], rtol=0.0, atol=1e-4)
    assert not np.array_equal(found[np.float32], found[np.float64])
    assert np.isfinite(found[np.float16]).all()


@pytest.mark.parametrize("scheme", ["efficient-hajek", "mifa+efficient"])
@pytest.mark.parametrize("stop", [1, 5])
def test_integers_take_no_part_and_several_arrays_are_one_vector(
    tmp_path: Path, scheme: str, stop: int
) -> None:
    """Two arrays train like one of both; integers move by the weighted sum of their own."""
    alone, split = made(tmp_path, "alone"), made(tmp_path, "split")

    def parts(k: int) -> Any:
        def reply(message: Message, index: int) -> Message:
            if busy(k, index):
                return declined(message, "busy")
            arrays = message.content.array_records["arrays"]
            a, b, seen = (arrays[name].numpy() for name in ("a", "b", "seen"))
            move = (goal(k) - np.append(a.reshape(-1), b)) / 3.0
            one = np.asfortranarray(a + move[:2].reshape(2, 1))
            return answered(message, {"a": one, "seen": seen + 1, "b": b + move[2]})

        return reply

    split.behaviours = {k: parts(k) for k in range(INSIDE)}
    split.start = ArrayRecord(
        {"a": Array(np.zeros((2, 1))), "seen": Array(np.array([0, 0])), "b": Array(np.zeros(()))}
    )
    run(split, stop, scheme)
    run(split, 5, scheme)
    run(alone, 5, scheme)
    arrays = split.result.arrays  # type: ignore[attr-defined]
    joined = np.append(arrays["a"].numpy().reshape(-1), arrays["b"].numpy())
    expected = alone.result.arrays["theta"].numpy()  # type: ignore[attr-defined]
    np.testing.assert_allclose(joined, expected, rtol=0.0, atol=EXACT)
    np.testing.assert_allclose(arrays["seen"].numpy(), 5.0, rtol=1e-12)  # weights sum to one


def growing(where: Path, name: str) -> Small:
    """Return a federation of twelve, of whom two enroll in round 4 and one leaves before 5."""
    small = made(where, name)
    row = pl.int_range(pl.len())
    since = pl.when(row < INSIDE - 2).then(1).when(row < INSIDE).then(4)
    until = pl.when(row == 1).then(5)
    people = small.people.with_columns(enrolled_from=since, enrolled_until=until)
    people.write_parquet(small.where / "people.parquet")
    return small


@pytest.mark.parametrize("scheme", UPDATES)
def test_the_sum_follows_enrollment_and_forgets_who_left(tmp_path: Path, scheme: str) -> None:
    whole, parts = growing(tmp_path, "whole"), growing(tmp_path, "parts")
    for index in range(1, ROUNDS + 1):
        strategy = run(parts, index, scheme, average=None)
        clients, total = kept(parts)
        omega = omega_of(strategy, index)
        np.testing.assert_allclose(total, direct(clients, omega), rtol=0.0, atol=EXACT)
        enrolled = strategy.config.stage.members.present(index, strategy._clock())
        assert set(clients) <= set(np.flatnonzero(enrolled).tolist())
        assert (1 in clients) == (index < 5)
        assert (INSIDE - 1 in clients) == (index >= 4 and not_busy_since(INSIDE - 1, 4, index))
    run(whole, ROUNDS, scheme, average=None)
    assert bytes_of(whole.result) == bytes_of(parts.result)  # type: ignore[attr-defined]


def not_busy_since(k: int, first: int, last: int) -> bool:
    return any(not busy(k, index) for index in range(first, last + 1))


def test_a_round_without_replies_keeps_the_memory(tmp_path: Path) -> None:
    small = made(tmp_path, "a")
    run(small, 3, "efficient")
    before = files(small)
    small.behaviours = dict.fromkeys(range(INSIDE), lambda message, _: declined(message))
    run(small, 4, "efficient")
    after = files(small)
    assert before.keys() == after.keys()
    small.behaviours = {k: pulled(k) for k in range(INSIDE)}
    strategy = run(small, 5, "efficient")
    clients, total = kept(small)
    np.testing.assert_allclose(total, direct(clients, omega_of(strategy, 5)), rtol=0.0, atol=EXACT)


def test_clipped_updates_are_kept_as_they_were_added(tmp_path: Path) -> None:
    small = made(tmp_path, "a")
    run(small, 2, "mifa+efficient", screen=Screen(clip=0.1), average=None)
    clients, _ = kept(small)
    norms = [float(np.linalg.norm(v)) for v in clients.values()]
    assert max(norms) == pytest.approx(0.1, rel=1e-12)
    metrics = small.result.train_metrics_clientapp[2]  # type: ignore[attr-defined]
    assert metrics["fedipw-clipped"] > 0
    strategy = small.strategy(scheme="mifa+efficient")
    largest = float(omega_of(strategy, 2).max())
    assert metrics["fedipw-influence"] <= 0.1 * largest * (1.0 + 1e-12)


LIAR = 5


def liar(lie: Callable[[Message], Message], late: int) -> Any:
    def reply(message: Message, index: int) -> Message:
        return lie(message) if index == late else pulled(LIAR)(message, index)

    return reply


LIES: dict[str, Callable[[Message], Message]] = {
    "NaN": lambda m: answered(m, {"theta": theta(m) * np.nan}),
    "shape": lambda m: answered(m, {"theta": np.zeros(4)}),
    "keys": lambda m: answered(m, {"beta": np.zeros(3)}),
    "huge": lambda m: answered(m, {"theta": theta(m) + 1e9}),
    "integers": lambda m: answered(m, {"theta": np.zeros(3, dtype=np.int64)}),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_refused_reply_leaves_the_memory_as_it_was(tmp_path: Path, lie: str) -> None:
    found = []
    for name, behaviour in (
        ("lie", liar(LIES[lie], 3)),
        ("silent", liar(lambda m: declined(m, "no"), 3)),
    ):
        small = made(tmp_path, name)
        small.behaviours[LIAR] = behaviour
        run(small, 5, "efficient-hajek")
        found.append((bytes_of(small.result), files(small)))  # type: ignore[attr-defined]
    (one, first), (two, second) = found
    assert one == two
    assert {k: v.tobytes() for k, v in first.items()} == {k: v.tobytes() for k, v in second.items()}


def test_what_one_client_does_stays_within_the_bound_that_is_told(tmp_path: Path) -> None:
    """The same run with an update of zero in its place tells what the update did, in each round."""
    moves: dict[str, list[FloatArray]] = {}
    bounds = []
    for name, size in (("lie", 50.0), ("nothing", 0.0)):
        small = made(tmp_path, name)

        def lie(message: Message, size: float = size) -> Message:
            return answered(message, {"theta": theta(message) + size * np.array([0.6, -0.8, 0.0])})

        def reply(message: Message, index: int, lie: Any = lie) -> Message:
            return lie(message) if index == 2 else declined(message)

        small.behaviours = dict.fromkeys(
            range(INSIDE), lambda m, _: answered(m, {"theta": theta(m)})
        )
        small.behaviours[LIAR] = reply
        before, moves[name] = small.start["theta"].numpy(), []
        for index in range(1, 6):
            run(small, index, "efficient-hajek", average=None, screen=Screen(clip=10.0))
            after = small.result.arrays["theta"].numpy()  # type: ignore[attr-defined]
            moves[name].append(after - before)
            before = after
            if name == "lie":
                metrics = small.result.train_metrics_clientapp[index]  # type: ignore[attr-defined]
                bounds.append(float(metrics["fedipw-influence"]))
    done = [float(np.linalg.norm(a - b)) for a, b in zip(*moves.values(), strict=True)]
    assert done[0] == 0.0
    assert min(done[1:]) > 0.0  # it counts in every later round
    for moved, bound in zip(done, bounds, strict=True):
        assert moved <= bound * (1.0 + 1e-9)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "noise": (
        {
            "scheme": "efficient", "screen": Screen(clip=1.0),
            "noise": GaussianNoise(multiplier=1.0, delta=1e-5),
        },
        "adds it to every later round, which the noise of this guarantee does not cover",
    ),
    "as you go": ({"scheme": "fedvarp+calibrated-online"}, "learns them as rounds go by"),
    "trim": ({"scheme": "mifa+efficient", "trim": 5.0}, "trim cuts the weights of replies"),
    "both": ({"scheme": "scaffold+augmented"}, "both decide what is remembered"),
    "fedprox": ({"scheme": "fedprox+efficient"}, "is a way of training"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_remembered_is_refused(tmp_path: Path, case: str) -> None:
    settings, why = REFUSED[case]
    with pytest.raises(InputError, match=why):
        Small(tmp_path).strategy(**settings)


def test_a_model_without_floating_point_arrays_is_refused(tmp_path: Path) -> None:
    small = Small(tmp_path)
    small.start = ArrayRecord({"theta": Array(np.zeros(3, dtype=np.int64))})
    with pytest.raises(InputError, match="no array of the model is floating-point"):
        small.trained(1, scheme="efficient")


def test_a_run_cannot_change_its_memory(tmp_path: Path) -> None:
    small = made(tmp_path, "a")
    run(small, 2, "efficient")
    for other in ("mifa+efficient", "efficient, augmentation=none", "scaffold+efficient"):
        with pytest.raises(InputError, match="written under other settings"):
            run(small, 3, other)
    people = small.people.with_row_index().sort("index", descending=True).drop("index")
    people.write_parquet(small.where / "people.parquet")
    run(small, 3, "efficient")  # the same clients in another order


def test_a_memory_is_of_the_clients_it_was_begun_with(tmp_path: Path) -> None:
    small = made(tmp_path, "a")
    run(small, 2, "efficient")
    (small.where / "ledger" / "checkpoint" / "enrolled.parquet").unlink()
    people = small.people.with_row_index().sort("index", descending=True).drop("index")
    people.write_parquet(small.where / "people.parquet")
    with pytest.raises(InputError, match="in another order"):  # and nothing says which
        run(small, 3, "efficient")


def damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("harm", "why"),
    [(Path.unlink, "is missing: it holds what is remembered"), (damaged, "is damaged")],
)
def test_a_lost_file_is_named_at_the_start(
    tmp_path: Path, harm: Callable[[Path], None], why: str
) -> None:
    small = made(tmp_path, "a")
    run(small, 3, "efficient")
    folder = small.where / "ledger" / "checkpoint" / "memory"
    path = sorted(folder.glob("0*.npy"))[4]
    saved, before = path.read_bytes(), bytes_of(small.result)  # type: ignore[attr-defined]
    harm(path)
    with pytest.raises(InputError, match=f"{path.name} {why}.*backup of the same round"):
        run(small, 4, "efficient")
    path.write_bytes(saved)
    run(small, 3, "efficient")
    assert bytes_of(small.result) == before  # type: ignore[attr-defined]


def test_a_lost_sum_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small, whole = made(tmp_path, "a"), made(tmp_path, "whole")
    run(small, 3, "efficient")
    run(whole, 5, "efficient")
    path = small.where / "ledger" / "checkpoint" / "memory" / "sum-000003.npy"
    saved = path.read_bytes()
    damaged(path)
    with pytest.raises(InputError, match=r"sum-000003.npy is damaged.*Remove it, and it is made"):
        run(small, 5, "efficient")
    path.unlink()
    with caplog.at_level("WARNING", "flwr"):
        run(small, 5, "efficient")
    assert "the sum is made anew from the clients' files" in caplog.text
    assert saved
    np.testing.assert_allclose(
        small.result.arrays["theta"].numpy(),  # type: ignore[attr-defined]
        whole.result.arrays["theta"].numpy(),  # type: ignore[attr-defined]
        rtol=0.0, atol=EXACT,
    )  # fmt: skip


def test_the_size_is_told_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small = made(tmp_path, "a", np.float32)
    with caplog.at_level("INFO", "flwr"):
        run(small, 1, "efficient")
    (line,) = [r.getMessage() for r in caplog.records if "memory of updates" in r.getMessage()]
    each = 128 + 3 * 4
    assert f"(fedvarp): 12 clients x {each} bytes = up to" in line
    told = re.search(r"= up to ([\d.]+) kB in .*memory, .*; [\d.]+ [GT]B free", line)
    assert told
    assert float(told[1]) == pytest.approx((12 * each + 2 * (128 + 24)) / 1e3, abs=0.05)
    taken = sum(array.nbytes + 128 for array in files(small).values())
    assert taken <= 12 * each + 2 * (128 + 24)
    assert "a kept update counts with the client's enrollment weight omega" in caplog.text


def test_a_disk_too_small_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = made(tmp_path, "a")
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 100})())
    with caplog.at_level("WARNING", "flwr"):
        run(small, 1, "efficient")
    assert "has 100 bytes free, and the memory may grow by" in caplog.text
