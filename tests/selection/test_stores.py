"""One learner, rows in a panel or in blocks: the same probabilities, those of a plain fit."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.special import expit
from sklearn.exceptions import ConvergenceWarning

import worlds
from fedipw.errors import InputError, SeparationError
from fedipw.numerics import BoolArray, FloatArray
from fedipw.selection.classifiers import Classifier, Newton
from fedipw.selection.coded import TableSettings, table_model
from fedipw.selection.enrollment import enrollment_stage
from fedipw.selection.participation import (
    Coder,
    Participation,
    ParticipationSettings,
    Source,
    StepRows,
    Window,
    panel,
)
from fedipw.selection.propensity import NewtonLogistic
from fedipw.selection.rowstore import BlockStore, PanelStore
from fedipw.selection.steps import (
    CLOCK_COLUMNS,
    REPLY_COLUMNS,
    Formulas,
    ReplyHistory,
    participation_steps,
)
from fedipw.tables.design import Design, DesignRows, Missing
from fedipw.tables.ledger import Ledger, Round
from fedipw.tables.population import Members, Population
from fedipw.tables.table import Table
from fedipw.weighting.methods import method_named
from fedipw.weighting.replay import Observer, Plan, Replay
from fedipw.weighting.weigher import RoundWeights

CLIENTS, ROUNDS = 160, 7
LEVELS = {"os": ["ios", "droid", "web"], "net": ["wifi", "cell"]}


class World(NamedTuple):
    """Clients with a number and a text, rounds with the same, and who replied, (R, n)."""

    members: Members
    tables: list[pl.DataFrame]
    replied: BoolArray

    def round(self, r: int) -> Round:
        return Round(index=r + 1, rows=np.arange(CLIENTS), table=self.tables[r])


def world(seed: int) -> World:
    rng = np.random.default_rng(seed)
    os_ = np.resize(LEVELS["os"], CLIENTS)
    age = rng.normal(40.0, 9.0, CLIENTS)
    members = Members(pl.DataFrame({"unit_id": np.arange(CLIENTS), "age": age, "os": os_}))
    tables, replied = [], []
    for _ in range(ROUNDS):
        battery, net = rng.random(CLIENTS), rng.permutation(np.resize(LEVELS["net"], CLIENTS))
        odds = -0.5 + 0.05 * (age - 40.0) + (battery - 0.5) + 0.6 * (net == "wifi")
        tables.append(pl.DataFrame({"net": net, "battery": battery}))
        replied.append(rng.random(CLIENTS) < expit(odds))
    return World(members, tables, np.array(replied))


def design_by_hand(drawn: World, *, history: bool) -> FloatArray:
    """Return the columns of every round, (R, n, q): dummies without the first level."""
    frame, past, rounds = drawn.members.frame, ReplyHistory.of(CLIENTS), []
    for r, (table, replied) in enumerate(zip(drawn.tables, drawn.replied, strict=True), 1):
        columns = [
            frame["age"].to_numpy(),
            *(frame["os"].eq(level).to_numpy() for level in ("ios", "web")),
            table["net"].eq("wifi").to_numpy(),
            table["battery"].to_numpy(),
        ]
        if history:
            turn = 2 * np.pi * r / 24
            columns += [
                *past.matrix().T,
                np.full(CLIENTS, np.sin(turn)),
                np.full(CLIENTS, np.cos(turn)),
            ]
        rounds.append(np.column_stack(columns))
        past = past.after(replied)
    return np.array(rounds)


WINDOWS = {
    "past": ParticipationSettings(refit_every=1),
    "past, every third": ParticipationSettings(refit_every=3),
    "rolling": ParticipationSettings(refit_every=1, last=3),
    "decay": ParticipationSettings(refit_every=1, decay=0.8),
    "decay, rolling": ParticipationSettings(refit_every=1, decay=0.8, last=3),
    "same-round": ParticipationSettings(window=Window.SAME_ROUND, per_coefficient=3.0),
}


def learner(
    drawn: World,
    chosen: ParticipationSettings,
    *,
    in_panel: bool,
    history: bool = False,
    formula: str = ".",
) -> Participation:
    formulas = Formulas(reply=formula, history=history)
    steps = participation_steps(drawn.round(0), drawn.members, formulas)
    store = panel(chosen.estimator) if in_panel else None
    return Participation(drawn.members, steps, chosen, store=store)


def played(drawn: World, model: Participation) -> list[StepRows]:
    found: list[StepRows] = []
    for r in range(ROUNDS):
        model.open(drawn.round(r))
        model.prob(drawn.replied[r])
        found += model.step_rows(drawn.replied[r])
        model.close(drawn.replied[r])
    return found


@pytest.mark.parametrize("history", [False, True])
@pytest.mark.parametrize("name", WINDOWS)
@settings(max_examples=4)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_panel_and_blocks_give_the_same_probabilities(
    name: str, history: bool, seed: int
) -> None:
    drawn, chosen = world(seed), WINDOWS[name]
    models = [learner(drawn, chosen, history=history, in_panel=kind) for kind in (True, False)]
    assert isinstance(models[0].steps[0].store, PanelStore)
    assert isinstance(models[1].steps[0].store, BlockStore)
    names = models[0].steps[0].step.design.names
    assert names[:5] == ("age", "os[ios]", "os[web]", "net[wifi]", "battery")
    assert names[5:] == ((*REPLY_COLUMNS, *CLOCK_COLUMNS) if history else ())
    for here, there in zip(*(played(drawn, model) for model in models), strict=True):
        np.testing.assert_allclose(here.prob, there.prob, rtol=1e-10)
        assert here.source is there.source


@pytest.mark.parametrize("in_panel", [True, False], ids=["panel", "blocks"])
@pytest.mark.parametrize("history", [False, True])
@pytest.mark.parametrize("name", WINDOWS)
def test_they_are_those_of_a_plain_fit_on_stacked_rows(
    name: str, history: bool, in_panel: bool
) -> None:
    drawn, chosen = world(11), WINDOWS[name]
    X, fitted = design_by_hand(drawn, history=history), 0
    found = played(drawn, learner(drawn, chosen, history=history, in_panel=in_panel))
    for r, rows in enumerate(found):
        if rows.source is not Source.MODEL:
            continue
        first, last = 0 if chosen.last is None else max(0, r - chosen.last), r
        if name == "past, every third":
            last = r if r <= 3 else 3 * (r // 3)
        if chosen.window is Window.SAME_ROUND:
            first, last = r, r + 1
        labels = drawn.replied[first:last].ravel()
        weights = np.repeat(chosen.decay ** np.arange(last - first - 1.0, -1.0, -1.0), CLIENTS)
        rows_by_hand = X[first:last].reshape(len(labels), -1)
        plain = NewtonLogistic().fit(rows_by_hand, labels, sample_weight=weights)
        np.testing.assert_allclose(rows.prob, plain.predict_proba(X[r])[:, 1], rtol=1e-8)
        fitted += 1
    assert fitted >= ROUNDS - 3  # the first rounds have too few rows


@pytest.mark.parametrize("in_panel", [True, False], ids=["panel", "blocks"])
@pytest.mark.parametrize(
    "formula", ["age*net", "os:battery", "age:battery + age + battery", "net", "age", "battery**2"]
)
def test_columns_of_clients_and_rounds_may_be_crossed_or_stand_alone(
    formula: str, in_panel: bool
) -> None:
    drawn = world(4)
    model = learner(drawn, WINDOWS["past"], formula=formula, in_panel=in_panel)
    found, design = played(drawn, model)[-1], model.steps[0].step.design
    own = drawn.members.frame.drop("unit_id").get_columns()
    X = np.array([design.rows(table.hstack(own), "all").columns.T for table in drawn.tables])
    labels = drawn.replied[:-1].ravel()
    plain = NewtonLogistic().fit(X[:-1].reshape(len(labels), -1), labels)
    assert found.source is Source.MODEL
    np.testing.assert_allclose(found.prob, plain.predict_proba(X[-1])[:, 1], rtol=1e-8)


@pytest.mark.parametrize("folds", [None, 3])
def test_classifiers_see_the_same_rows_and_folds(folds: int | None) -> None:
    chosen = ParticipationSettings(estimator=Classifier(NewtonLogistic(), folds=folds, seed=5))
    drawn = world(2)
    here, there = (played(drawn, learner(drawn, chosen, in_panel=kind)) for kind in (True, False))
    for mine, theirs in zip(here, there, strict=True):
        np.testing.assert_array_equal(mine.prob, theirs.prob)


# Separation is decided by one rule


def separated(rows: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    try:
        Newton().fitted(rows, names)
    except SeparationError as error:
        return error.columns
    return ()


@settings(max_examples=60)
@example(seed=3997566, rounds=3, clients=3, steep=0.0)  # z alone separates, and x alone
@given(
    seed=st.integers(0, 2**32 - 1), rounds=st.integers(1, 4), clients=st.integers(3, 8),
    steep=st.sampled_from([0.0, 1.0, 4.0]),
)  # fmt: skip
def test_panels_blocks_files_and_arrays_say_the_same_of_separation(
    tmp_path_factory: pytest.TempPathFactory, seed: int, rounds: int, clients: int, steep: float
) -> None:
    rng = np.random.default_rng(seed)
    z, x = rng.integers(0, 3, (1, clients)), rng.integers(0, 4, (rounds, 1, clients))
    odds = steep * (x[:, 0] - 1.5 + z[0] - 1.0)
    labels = (rng.random((rounds, clients)) < expit(odds)).astype(np.int8)
    if labels.all() or not labels.any():
        return
    names, who = ("z", "x"), np.arange(clients)
    stores = PanelStore(z.astype(float), np.array([0]), 2), BlockStore(clients)
    for now, passed in zip(x.astype(float), labels, strict=True):
        for store in stores:
            store.append(np.vstack([z, now]).astype(float), passed, who)
    said = {separated(store.rounds(0, rounds), names) for store in stores}
    stacked = np.column_stack([np.tile(z[0], rounds), x.ravel()]).astype(float)
    path = tmp_path_factory.mktemp("rows") / "rows.parquet"
    frame = pl.DataFrame(stacked, schema=["z", "x"])
    frame.with_columns(enrolled=pl.Series(labels.ravel() == 1)).write_parquet(path)
    try:
        table_model(Table(path), "z + x")
        said.add(())
    except SeparationError as error:
        said.add(error.columns)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        plain = NewtonLogistic().fit(stacked, labels.ravel())
    said.add(tuple(names[j] for j in plain.separation_))
    assert len(said) == 1, said


# Levels that no fitted row has


def ledger_world(tmp_path: Path) -> tuple[Members, Ledger]:
    """Return 300 clients and five rounds; ``net`` is 5g for some replies of round 4 only."""
    drawn = worlds.World(
        size=300, rounds=5, seed=3, changing=("net",), enrollment=worlds.EVERYONE,
        reply=pl.lit(-0.4),
    )  # fmt: skip
    given, place = worlds.drawn(drawn), pl.int_range(pl.len())
    net = pl.when(place < 10).then(pl.lit("5g")).otherwise("net")
    given.changed(4, net=net, replied=pl.col("replied") | (place < 5)).write(tmp_path)
    return Members(given.people.drop("enrolled")), Ledger(tmp_path / "rounds")


def rounds_of(ledger: Ledger) -> list[tuple[Round, BoolArray]]:
    return [
        (Round(index=k, rows=np.arange(300), table=t.drop("replied")), t["replied"].to_numpy())
        for k, t in enumerate(ledger, start=1)
    ]


@pytest.mark.parametrize("missing", [Missing.ERROR, Missing.DROP])
def test_a_level_no_fit_has_seen_has_no_probability(missing: Missing, tmp_path: Path) -> None:
    members, ledger = ledger_world(tmp_path)
    steps = participation_steps(ledger, members, Formulas(reply="age + net", missing=missing))
    model = Participation(members, steps, ParticipationSettings(refit_every=1))
    for round_, replied in rounds_of(ledger):
        model.open(round_)
        if round_.index == 4 and missing is Missing.ERROR:
            count = int(replied[:10].sum())
            said = rf"net\[5g\] occurs in {count} replies and in no row of the rounds fitted on"
            with pytest.raises(InputError, match=said):
                model.prob(replied)
            return
        found = model.prob(replied)
        first = np.flatnonzero(replied) < 10
        np.testing.assert_array_equal(found.known, ~(first & (round_.index == 4)))
        assert np.isnan(found.prob[~found.known]).all()
        taken = model.close(replied)
        assert taken[0].all()  # those rows are fitted on from then on


# A round is coded once


class _Steps(Observer):
    """Asks for the steps of every round, as an audit does."""

    wants_steps = True

    def __init__(self) -> None:
        self.seen = 0

    def weighed(self, steps: Any, found: RoundWeights | None) -> None:
        del found
        self.seen += len(steps)


@pytest.mark.parametrize("wants_steps", [False, True])
@pytest.mark.parametrize("window", list(Window))
@pytest.mark.parametrize("reply", ["age + net", "age*net"], ids=["apart", "crossed"])
def test_a_round_is_coded_once_in_a_replay(
    window: Window,
    reply: str,
    wants_steps: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    members, ledger = ledger_world(tmp_path)
    rng = np.random.default_rng(0)
    others = pl.DataFrame({"unit_id": range(300, 700), "age": rng.normal(0.5, 1.0, 400)})
    listed = pl.concat(
        [members.frame.with_columns(enrolled=True), others.with_columns(enrolled=False)]
    )
    stage = enrollment_stage(Population(listed))
    coded, designed = Counter[str](), Counter[str]()
    code, rows = Coder.code, Design.rows

    def counted_code(self: Coder, table: pl.DataFrame, who: Any, where: str) -> Any:
        coded[where] += 1
        return code(self, table, who, where)

    def counted_rows(self: Design, frame: pl.DataFrame, where: str) -> DesignRows:
        designed[where] += 1
        return rows(self, frame, where)

    monkeypatch.setattr(Coder, "code", counted_code)
    monkeypatch.setattr(Design, "rows", counted_rows)
    plan = Plan(
        method=method_named("fedipw"),
        formulas=Formulas(reply=reply, missing=Missing.DROP),
        settings=ParticipationSettings(window=window, refit_every=1),
    )
    observer = _Steps()
    replay = Replay(stage, ledger, plan, observers=[observer] if wants_steps else [])
    assert len(list(replay)) == 5
    assert observer.seen == (5 if wants_steps else 0)
    passes = 2 if window is Window.POOLED else 1  # that reads the ledger twice
    every = {f"round {k}": passes for k in range(1, 6)}
    assert coded == every
    assert {k: n for k, n in designed.items() if k.startswith("round")} == every
    assert designed["enrolled clients"] <= 1 + passes  # the table of clients: once a learner


def test_settings_reach_the_enrollment_fit() -> None:
    """A penalty of the estimator is that of the fit on files, too."""
    frame = pl.DataFrame({"unit_id": range(60), "x": np.arange(60.0)}).with_columns(
        enrolled=pl.col("unit_id") % 3 == 0
    )
    found = table_model(Table(frame), "x", settings=TableSettings(estimator=Newton(l2=4.0)))
    plain = NewtonLogistic(l2=4.0).fit(frame.select("x").to_numpy(), frame["enrolled"].to_numpy())
    np.testing.assert_allclose(found.logistic().coefficients, plain.coef_[0], rtol=1e-9)
