"""The world of ``fedipw example``: its files, its truth, and that its commands work as printed."""

from __future__ import annotations

import shlex
from pathlib import Path

import polars as pl
import pytest

import fedipw
from cli.command import fedipw as run
from cli.command import succeeded
from fedipw.errors import InputError
from fedipw.example_world import Example, example

METRICS = ("error_rate", "kept")


@pytest.fixture(scope="module")
def world() -> Example:
    return example()


def test_the_same_seed_gives_the_same_world(world: Example) -> None:
    again = fedipw.example()
    assert again.devices.equals(world.devices)
    assert all(a.equals(b) for a, b in zip(again.rounds, world.rounds, strict=True))
    assert all(again.metrics[name].equals(world.metrics[name]) for name in METRICS)
    assert not example(seed=1).devices.equals(world.devices)


def test_it_looks_like_a_registry(world: Example) -> None:
    devices = world.devices
    assert devices.height == 5_000
    assert len(world.rounds) == 30
    assert 0.05 < devices["income"].null_count() / devices.height < 0.15
    assert any(not name.isascii() for name in devices["region"].unique())
    assert 0.25 < devices["enrolled"].mean() < 0.35  # type: ignore[operator]
    assert set(world.metrics["kept"]["value"].unique()) == {0.0, 1.0}


def test_the_truth_is_the_mean_over_all_devices(world: Example) -> None:
    shares = list(world.devices["os"].value_counts(normalize=True).iter_rows())
    for metric in METRICS:
        by_system = sum(share * world.truth(metric, f"os = {name}") for name, share in shares)
        assert by_system == pytest.approx(world.truth(metric), rel=1e-12)
    with pytest.raises(InputError, match="no truth of 'loss'"):
        world.truth("loss")


@pytest.mark.parametrize("metric", METRICS)
def test_weights_find_the_truth_that_plain_means_miss(
    world: Example, metric: str, tmp_path: Path
) -> None:
    found = fedipw.evaluate(
        world.metrics[metric], world.population, world.ledger(tmp_path / "r"), missing="indicator"
    )
    truth = world.truth(metric)
    plain, hajek = found.of("plain"), found.of("hajek")
    assert not plain.low < truth < plain.high
    assert hajek.low < truth < hajek.high


@pytest.mark.parametrize("kind", ["table", "totals"])
def test_every_command_works_as_printed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = succeeded("example", "--out", "my world", "--kind", kind)
    lines = [line for line in made.splitlines() if line.startswith("fedipw ")]
    assert len(lines) == 5
    for line in lines:
        succeeded(*shlex.split(line)[1:])
    assert (tmp_path / "my world" / "devices.csv").exists() == (kind == "table")
    assert (tmp_path / "my world" / "audit.html").stat().st_size > 10_000
    assert pl.read_csv(tmp_path / "my world" / "weights.csv").height > 10_000


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "example").mkdir()
    code, _, error = run("example", "--out", tmp_path / "example")
    assert code == 2
    assert "is there already" in error
    assert not list((tmp_path / "example").iterdir())
