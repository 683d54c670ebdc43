"""With ``--state`` only new rounds are read, and every file has the bytes of a run from scratch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from benchmarks.incremental import compared
from benchmarks.ledger import write_log

import fedipw
from fedipw.errors import FedIPWWarning, InputError
from fedipw.storage.lock import locked
from fedipw.tables.ledger import Ledger
from fedipw.tables.population import Population
from fedipw.weighting.replay import Observer, Replay
from fedipw.weighting.resume import saved_run
from fedipw.weighting.settings import Settings
from worlds import STEPS, World

from .command import Files, succeeded
from .command import fedipw as run

pytestmark = pytest.mark.filterwarnings("always::fedipw.errors.FedIPWWarning")
ROUNDS, CUT = 12, 8
WORLD = World(
    size=150, rounds=ROUNDS, covariates=("age", "os"), changing=("battery", "network"),
)  # fmt: skip


class Growing(Files):
    """The files of a world whose ledger grows: rounds keep their files, and their times."""

    def begun(self, rounds: int = CUT) -> Growing:
        self.put()
        (self.where / "later").mkdir()
        for index in range(rounds + 1, len(self.rounds) + 1):
            self.round(index).rename(self.where / "later" / self.round(index).name)
        return self

    def grow(self, last: int = ROUNDS) -> None:
        for path in sorted((self.where / "later").iterdir()):
            if int(path.stem[-6:]) <= last:
                path.rename(self.where / "rounds" / path.name)

    @property
    def state(self) -> Path:
        return self.where / "state" / "weights"

    def made(self, *options: object, **given: Any) -> tuple[bytes, str, str]:
        """Return the file of weights, the summary and the notices, but for that on the output."""
        code, out, err = self.weights(*options, "--json", out="w.parquet", **given)
        assert code == 0, err
        lines = [line for line in err.splitlines() if "will be replaced" not in line]
        return (self.where / "w.parquet").read_bytes(), out, "\n".join(lines)

    def going_on(self, *options: object, **given: Any) -> tuple[bytes, str, str]:
        return self.made(*options, "--state", self.where / "state", **given)


def growing(folder: Path, world: World = WORLD, rounds: int = CUT) -> Growing:
    return Growing.of(world, folder).begun(rounds)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which every round is added that is read."""
    reading, seen = Ledger.read, list[int]()

    def watched(self: Ledger, index: int) -> pl.DataFrame:
        seen.append(index)
        return reading(self, index)

    monkeypatch.setattr(Ledger, "read", watched)
    return seen


NAIVE = "sklearn.naive_bayes.GaussianNB"
NEW = list(range(CUT + 1, ROUNDS + 1))
THREE = World(
    size=150, rounds=ROUNDS, covariates=("age", "os"), changing=("battery",), steps=STEPS
)  # fmt: skip


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (WORLD, ["--refit-every", 3, "--models-table"]),
        (WORLD, ["--window", 4, "--refit-every", 3, "--trim", 3]),
        (WORLD, ["--decay", 0.8, "--refit-every", 3, "--models-table"]),
        (WORLD, ["--participation-fit", "same-round"]),
        (WORLD, ["--history", "--refit-every", 3, "--scheme", "fedipw"]),
        (WORLD, ["--scheme", "calibrated-online"]),
        (WORLD, ["--scheme", "collapsed"]),
        (WORLD, ["--participation", "battery", "--classifier", NAIVE, "--folds", 0]),
        (THREE, ["--history", "--missing", "drop", "--models-table"]),
    ],
    ids=["past", "window", "decay", "same-round", "history", "online", "collapsed", "classifier",
         "steps"],
)  # fmt: skip
def test_a_ledger_that_grew_costs_its_new_rounds_and_ends_in_the_same_bytes(
    tmp_path: Path, read: list[int], world: World, options: list[object]
) -> None:
    files = growing(tmp_path, world)
    first = files.going_on(*options)
    assert not first[2]
    files.grow()
    read.clear()
    assert files.going_on(*options) == (whole := files.made(*options))
    assert read == [*NEW, *range(1, ROUNDS + 1)]
    read.clear()
    assert files.going_on(*options) == whole  # and nothing at all, where nothing is new
    assert read == []


def test_clients_that_join_and_leave_are_enrolled_as_from_scratch(
    tmp_path: Path, read: list[int]
) -> None:
    """Some join before the state is saved, some after it; enrollment is fitted each time."""
    files = Growing.of(WORLD, tmp_path)
    since = (
        pl.when(pl.int_range(pl.len()) % 3 == 0).then(pl.int_range(pl.len()) % 4 * 3).otherwise(1)
    )
    until = pl.when(pl.int_range(pl.len()) % 10 == 1).then(ROUNDS - 1)
    files.people = files.people.with_columns(enrolled_from=since, enrolled_until=until)
    dates = files.people.select("unit_id", "enrolled_from", "enrolled_until")
    files.rounds = [
        table.join(dates, on="unit_id", maintain_order="left")
        .filter(pl.col("enrolled_from") <= k, pl.col("enrolled_until").fill_null(99) > k)
        .drop("enrolled_from", "enrolled_until")
        for k, table in enumerate(files.rounds, 1)
    ]
    files.begun()
    files.going_on()
    files.grow()
    read.clear()
    made = files.going_on()
    assert read == NEW
    assert made == files.made()
    assert pl.read_parquet(tmp_path / "w.parquet")["enrollment_prob"].n_unique() > 200


def test_targets_and_saved_models_go_on_too(tmp_path: Path, read: list[int]) -> None:
    files = growing(tmp_path)
    files.targets(*(f"{name},{value}" for name, value in files.means("age", "os[ios]").items()))
    files.made("--save-models", tmp_path / "models")
    for options, source in (((), "targets"), (("--models", tmp_path / "models"), "population")):
        shown = files.begun() if options else files
        shown.going_on(*options, source=source)
        shown.grow()
        read.clear()
        made = shown.going_on(*options, source=source)
        assert read == NEW
        assert made == shown.made(*options, source=source)
        for path in (*(tmp_path / "rounds").iterdir(), *(tmp_path / "later").iterdir()):
            path.unlink()
        (tmp_path / "later").rmdir()


def test_models_that_are_saved_have_the_same_bytes(tmp_path: Path) -> None:
    files = growing(tmp_path)
    files.going_on()
    files.grow()
    files.going_on("--save-models", tmp_path / "grown")
    files.made("--save-models", tmp_path / "whole")
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert names == ["enrollment.json", "participation.json"]
    for name in names:
        assert (tmp_path / "grown" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_other_targets_are_another_population(tmp_path: Path) -> None:
    files = growing(tmp_path)
    age = files.means("age")["age"]
    files.targets(f"age,{age}")
    files.going_on(source="targets")
    files.targets(f"age,{age + 0.01}")
    made, _, notice = files.going_on(source="targets")
    assert "(changed: population)" in notice
    assert made == files.made(source="targets")[0]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(bytes(data))


def rows(files: Growing) -> Path:
    return next(files.state.glob("rows-*.bin"))


def table(files: Growing) -> Path:
    return next(files.state.glob("tables-*/*.parquet"))


def of_others(files: Growing) -> None:
    """Change a client that is not enrolled."""
    other = pl.when(~pl.col("enrolled")).then(pl.col("age") + 0.1).otherwise("age")
    people = pl.read_parquet(files.where / "people.parquet").with_columns(age=other)
    people.write_parquet(files.where / "people.parquet")


def level(files: Growing) -> None:
    path = files.where / "rounds" / f"round-{ROUNDS:06d}.parquet"
    fresh = pl.when(pl.int_range(pl.len()) == 3).then(pl.lit("5g")).otherwise("network")
    pl.read_parquet(path).with_columns(network=fresh).write_parquet(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the weights of the whole ledger, from scratch."""
    return growing(tmp_path_factory.mktemp("whole"), rounds=ROUNDS).made()[0]


def left_aside(files: Growing, why: str, *options: object) -> bytes:
    """Return the weights of a run that says why it did not use the state."""
    made, _, notice = files.going_on(*options)
    assert notice.startswith(f"notice: {files.state} was not used, all rounds are read: ")
    assert why in notice
    assert len(list(files.state.glob("rows-*"))) == len(list(files.state.glob("tables-*"))) == 1
    return made


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda f: flip(f.state / "learner.npz"), "it is damaged"),
        (lambda f: flip(rows(f)), "its rows are damaged"),
        (lambda f: rows(f).write_bytes(rows(f).read_bytes()[:-8]), "its rows are cut off"),
        (lambda f: rows(f).unlink(), "its rows cannot be read"),
        (lambda f: flip(table(f)), "000001.parquet is damaged"),
        (lambda f: os.utime(f.round(2)), "the ledger's files have changed since"),
    ],
)
def test_a_damaged_state_is_left_aside_with_a_notice(
    tmp_path: Path, whole: bytes, spoil: Callable[[Growing], object], why: str
) -> None:
    files = growing(tmp_path)
    files.going_on()
    files.grow()
    spoil(files)
    assert left_aside(files, why) == whole
    assert not files.going_on()[2]  # it was made anew


def as_it_is(files: Growing) -> None:
    """Change nothing."""
    del files


@pytest.mark.parametrize(
    ("before", "spoil", "options", "why"),
    [
        ([], of_others, [], "(changed: population)"),
        (["--missing", "drop"], level, ["--missing", "drop"], "'network' has a new level, '5g'"),
        ([], as_it_is, ["--scheme", "fedipw"], "(changed: method)"),
        ([], as_it_is, ["--enrollment", "age"], "(changed: enrollment)"),
        ([], as_it_is, ["--participation", "battery"], "(changed: formulas)"),
    ],
)
def test_a_state_of_other_options_or_inputs_is_left_aside_with_a_notice(
    tmp_path: Path,
    before: list[object],
    spoil: Callable[[Growing], object],
    options: list[object],
    why: str,
) -> None:
    files = growing(tmp_path)
    files.going_on(*before)
    files.grow()
    spoil(files)
    assert left_aside(files, why, *options) == files.made(*options)[0]


def test_medians_move_with_new_rounds_and_all_is_made_anew(tmp_path: Path) -> None:
    files = Growing.of(WORLD, tmp_path)
    files.edit_all(battery=pl.when(pl.int_range(pl.len()) % 9 != 0).then("battery"))
    files.begun()
    files.going_on("--missing", "indicator")
    files.grow()
    *made, notice = files.going_on("--missing", "indicator")
    assert "covariates are coded otherwise" in notice
    assert made == list(files.made("--missing", "indicator")[:2])


KILLED = """
import sys
from pathlib import Path
from fedipw.tables.ledger import Ledger
from fedipw.tables.population import Population
from fedipw.weighting.replay import Replay
from fedipw.weighting.resume import saved_run
from fedipw.weighting.settings import Settings

folder, settings = Path(sys.argv[1]), Settings()
who, ledger = Population(folder / "people.parquet"), Ledger(folder / "rounds")
stage = settings.stage(who, later=ledger.covariates)
with saved_run(folder / "state", "weights", seconds=0.0) as saved:
    for table in Replay(stage, ledger, settings.plan(who), saved=saved):
        saved.keep(table)
        print(table["round"][0], flush=True)
        if table["round"][0] == 6:
            sys.stdin.read()
"""


def test_a_command_that_was_killed_goes_on_where_it_was(tmp_path: Path, read: list[int]) -> None:
    """It was saved after five rounds, and has kept the sixth round's table, when it is killed."""
    files = growing(tmp_path, rounds=ROUNDS)
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline().strip() for _ in range(6)][-1] == "6"
        code, _, err = files.weights("--state", tmp_path / "state", out="w.parquet")
        assert (code, "is in use: process" in err) == (2, True)  # one at a time
        process.send_signal(signal.SIGKILL)
    (files.state / "rows-00000000.bin").write_bytes(b"of a state that was never saved")
    read.clear()
    made = files.going_on()
    assert read == list(range(6, ROUNDS + 1))
    assert made == files.made()
    assert not (files.state / "rows-00000000.bin").exists()


def test_a_state_cannot_be_used_by_the_pooled_fit(tmp_path: Path) -> None:
    files = growing(tmp_path)
    code, _, err = files.weights("--participation-fit", "pooled", "--state", tmp_path / "state")
    assert (code, "every new round changes every weight" in err) == (2, True)
    code, _, err = files.weights("--state", files.where / "rounds" / "state")
    assert (code, "lies in the ledger" in err) == (2, True)
    (tmp_path / "file").write_text("")
    code, _, err = files.weights("--state", tmp_path / "file")
    assert (code, "cannot be made" in err) == (2, True)


def audited(files: Growing, name: str, *options: object) -> tuple[bytes, bytes, str]:
    """Return page, JSON and notices of an audit."""
    page, numbers = files.where / f"{name}.html", files.where / f"{name}.json"
    places = ["--out", page, "--json", numbers, "--force"]
    code, _, err = run("audit", *files.given(), *places, *options)
    assert code == 0, err
    lines = [line for line in err.splitlines() if "will be replaced" not in line]
    return page.read_bytes(), numbers.read_bytes(), "\n".join(lines)


@pytest.mark.parametrize("scheme", ["fedipw-hajek", "calibrated-online"])
def test_an_audit_of_a_ledger_that_grew_reads_its_new_rounds(
    tmp_path: Path, read: list[int], scheme: str
) -> None:
    """Eight rounds at most are looked at for the ranges of columns, which are categories here."""
    world = World(
        size=150, rounds=ROUNDS, covariates=("age", "os"), changing=("net",), hours=5,
        metric=pl.col("age"), reply=0.5 * pl.col("age") + (pl.col("net") == "wifi"),
    )  # fmt: skip
    files = growing(tmp_path, world)
    whole_metrics = files.metrics
    options = ["--metrics", tmp_path / "loss.parquet", "--min-cell", 3, "--scheme", scheme]
    whole_metrics.filter(pl.col("round") < CUT).write_parquet(tmp_path / "loss.parquet")
    audited(files, "before", *options, "--state", tmp_path / "state")
    files.grow()
    late = whole_metrics.filter((pl.col("round") < CUT) | (pl.col("round") > CUT))
    late.write_parquet(tmp_path / "loss.parquet")
    read.clear()
    made = audited(files, "report", *options, "--state", tmp_path / "state")
    assert read[-len(NEW) :] == NEW
    assert len(read) <= 8 + len(NEW)
    assert made == audited(files, "report", *options)
    whole_metrics.write_parquet(tmp_path / "loss.parquet")  # of a round that was audited without
    *anew, notice = audited(files, "report", *options, "--state", tmp_path / "state")
    assert "metrics of earlier rounds have changed" in notice
    assert anew == list(audited(files, "report", *options)[:2])


def test_an_audit_whose_ranges_move_is_made_anew(tmp_path: Path) -> None:
    files = growing(tmp_path)
    state = ["--state", tmp_path / "state", "--min-cell", 3]
    audited(files, "before", *state)
    files.grow()
    *made, notice = audited(files, "report", *state)
    assert "other columns, levels or ranges" in notice
    assert made == list(audited(files, "report", "--min-cell", 3)[:2])
    code, _, err = run("audit", *files.given(rounds=False), "--out", tmp_path / "x.html", *state)
    assert (code, "--state goes with --rounds" in err) == (2, True)


def test_a_model_without_a_maximum_is_not_saved(tmp_path: Path) -> None:
    """An audit penalises it in every round; the next fit tries the maximum again."""
    files = Growing.of(WORLD, tmp_path)
    files.edit_all(replied=pl.col("battery") > 0.5)
    files.begun(ROUNDS)
    state = ["--state", tmp_path / "state", "--participation", "battery"]
    *made, notice = audited(files, "report", *state)
    assert "was not saved: the model of participation has no maximum" in notice
    assert made == list(audited(files, "report", "--participation", "battery")[:2])
    assert not (tmp_path / "state" / "audit" / "learner.npz").exists()


def test_from_python_the_same_weights_and_the_same_audit(tmp_path: Path) -> None:
    files = growing(tmp_path)
    people, rounds = pl.read_parquet(tmp_path / "people.parquet"), tmp_path / "rounds"
    given: dict[str, Any] = {"state": tmp_path / "state", "refit_every": 3}
    fedipw.weigh(people, rounds, **given)
    files.grow()
    made = fedipw.weigh(people, rounds, **given)
    whole = fedipw.weigh(people, rounds, refit_every=3)
    assert made.table.equals(whole.table)
    assert made.summary() == whole.summary()
    older = people.with_columns(pl.col("age") + 1.0)  # a frame is told by its values
    with pytest.warns(FedIPWWarning, match="changed: members, population"):
        fedipw.weigh(older, rounds, **given)
    audit = fedipw.audit(people, rounds, **given)
    assert audit.to_json() == fedipw.audit(people, rounds, refit_every=3).to_json()
    with pytest.raises(InputError, match="give the rounds too"):
        fedipw.audit(people, state=tmp_path / "state")


class Silent(Observer):
    """Counts what it cannot save."""


def test_an_observer_that_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    growing(tmp_path)
    who, ledger = Population(tmp_path / "people.parquet"), Ledger(tmp_path / "rounds")
    settings = Settings()
    stage = settings.stage(who, later=ledger.covariates)
    with saved_run(tmp_path / "state", "weights") as saved:
        replay = Replay(stage, ledger, settings.plan(who), observers=[Silent()], saved=saved)
        with pytest.raises(InputError, match="Silent cannot go on from a saved state"):
            list(replay)


def test_a_state_that_cannot_be_saved_does_not_cost_the_weights(tmp_path: Path) -> None:
    files = growing(tmp_path)
    files.state.mkdir(parents=True)
    (files.state / "learner.npz").mkdir()  # in the way
    *made, notice = files.going_on()
    assert "was not saved" in notice
    assert made == list(files.made()[:2])


def test_the_state_is_held_by_one_command(tmp_path: Path) -> None:
    files = growing(tmp_path)
    files.state.mkdir(parents=True)
    with locked(files.state, "runs weights from it"):
        code, _, err = files.weights("--state", tmp_path / "state")
    assert (code, "runs weights from it" in err) == (2, True)
    assert succeeded("weights", "--help").count("--state") == 1


@pytest.mark.parametrize("job", ["weights", "audit"])
def test_the_benchmark_compares_what_it_says(tmp_path: Path, job: str) -> None:
    """A smoke test, in this process: 6 rounds, then 2 more."""
    write_log(tmp_path, 400, 8, steps=1)
    (tmp_path / "rounds").rename(tmp_path / "all")

    def here(words: list[str]) -> dict[str, Any]:
        return {"said": succeeded(*words), "processor_seconds": 1.0}

    found = compared(job, tmp_path, 6, 2, here)
    assert found["same_bytes"]
    assert found["share"] == 1.0
    assert found["state_gigabytes"] > 0.0
    assert len(list((tmp_path / "rounds").glob("*.parquet"))) == 8
