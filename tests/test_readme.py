"""The README's examples run as they stand, and what it links to is there."""

import re
from pathlib import Path

import polars as pl
import pytest

import fedipw

README = Path(__file__).parent.parent / "README.md"
TEXT = README.read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", TEXT, re.DOTALL)


def test_the_example_prints_what_it_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (example,) = blocks("python")
    exec(compile(example, str(README), "exec"), {})
    printed = capsys.readouterr().out
    assert "Weights(fedipw-hajek:" in printed
    assert printed in TEXT
    assert (tmp_path / "audit.html").is_file()


def test_the_strategy_is_made_of_the_columns_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flwr")
    monkeypatch.chdir(tmp_path)
    devices: pl.DataFrame = fedipw.example().devices
    devices.write_parquet("devices.parquet")
    (snippet,) = blocks("py")
    made, _, started = snippet.partition("strategy.start(")
    assert started  # needs a server
    found: dict[str, object] = {}
    exec(compile(made, str(README), "exec"), found)
    assert type(found["strategy"]).__name__ == "FedIPW"


def test_what_it_links_to_is_there() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)(?:#[^)]*)?\)", TEXT)
    assert "docs/tutorial.md" in links
    for link in links:
        assert (README.parent / link).exists(), link
