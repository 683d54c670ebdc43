"""One contract for every participation process."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from fedipw.lab.mechanisms import (
    ChangePointParticipation,
    DailyParticipation,
    DataAvailability,
    MarkovAvailability,
    ParticipationMechanism,
    ParticipationProcess,
    RoundDraw,
    ScaledSineAvailability,
    SineParticipation,
    TraceAvailability,
    TrendParticipation,
)
from fedipw.lab.testbed import Testbed

DRAWN = Testbed(size=60, rows=2, rows_max=9, features=1).draw(np.random.default_rng(1))
Maker = Callable[[Path], ParticipationMechanism]


def trace(folder: Path) -> TraceAvailability:
    rng = np.random.default_rng(9)
    path = folder / "log.parquet"
    pl.DataFrame(
        {
            "round": np.repeat(np.arange(1, 5), 60),
            "unit_id": np.tile(np.arange(60), 4),
            "replied": rng.random(240) < 0.4,
            "x": rng.normal(size=240),
        }
    ).write_parquet(path)
    return TraceAvailability(path=path, cycle=True)


MECHANISMS: dict[str, Maker] = {
    "daily": lambda _: DailyParticipation(rate_rounds=5),
    "markov": lambda _: MarkovAvailability(),
    "data": lambda _: DataAvailability(size=1.0, label=0.5),
    "sine": lambda _: SineParticipation(period=5),
    "trend": lambda _: TrendParticipation(length=5),
    "change-point": lambda _: ChangePointParticipation(at=4),
    "scaled-sine": lambda _: ScaledSineAvailability(period=5),
    "trace": trace,
}
every_mechanism = pytest.mark.parametrize("maker", MECHANISMS.values(), ids=MECHANISMS.keys())


def started(maker: Maker, folder: Path, seed: int = 5) -> ParticipationProcess:
    rng = np.random.default_rng(seed)
    return maker(folder).start(DRAWN.population, DRAWN.clients, rng)


def round_bytes(drawn: RoundDraw) -> tuple[int, bytes, bytes, bytes]:
    prob = b"" if drawn.participation_prob is None else drawn.participation_prob.tobytes()
    return drawn.index, drawn.covariates.tobytes(), prob, drawn.replied.tobytes()


@every_mechanism
@pytest.mark.parametrize("stop", [0, 1, 6])
def test_a_restored_process_continues_to_the_same_bytes(
    maker: Maker, tmp_path: Path, stop: int
) -> None:
    whole = started(maker, tmp_path)
    expected = [round_bytes(whole.advance()) for _ in range(stop + 5)]
    first = started(maker, tmp_path)
    for _ in range(stop):
        first.advance()
    saved = pickle.dumps(first.state())
    second = started(maker, tmp_path)  # started anew from the same seed
    second.advance()
    second.restore(pickle.loads(saved))
    assert [round_bytes(second.advance()) for _ in range(5)] == expected[stop:]


@every_mechanism
def test_a_saved_state_does_not_move_with_its_process(maker: Maker, tmp_path: Path) -> None:
    process = started(maker, tmp_path)
    process.advance()
    state = process.state()
    expected = [round_bytes(process.advance()) for _ in range(4)]
    process.restore(state)
    assert [round_bytes(process.advance()) for _ in range(4)] == expected


@every_mechanism
def test_rounds_have_the_shapes_they_promise(maker: Maker, tmp_path: Path) -> None:
    process = started(maker, tmp_path)
    for index in range(1, 8):
        drawn = process.advance()
        assert drawn.index == index
        assert drawn.covariates.shape == (60, len(process.columns))
        assert drawn.replied.shape == (60,)
        assert drawn.replied.dtype == bool
        assert np.isfinite(drawn.covariates).all()
        if drawn.participation_prob is not None:
            assert ((drawn.participation_prob > 0) & (drawn.participation_prob <= 1)).all()


@pytest.mark.parametrize("name", [name for name in MECHANISMS if name != "trace"])
def test_another_seed_gives_other_replies(name: str, tmp_path: Path) -> None:
    one, other = (started(MECHANISMS[name], tmp_path, seed) for seed in (5, 6))
    assert round_bytes(one.advance())[3] != round_bytes(other.advance())[3]


@every_mechanism
def test_starting_uses_only_the_generator_it_is_given(maker: Maker, tmp_path: Path) -> None:
    runs = []
    for _ in range(2):
        process = started(maker, tmp_path)
        runs.append([round_bytes(process.advance()) for _ in range(3)])
    assert runs[0] == runs[1]
