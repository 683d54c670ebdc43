"""The README's strategy can be made, and what it links to is there; ``test_docs`` runs the rest."""

import re
from pathlib import Path

import polars as pl
import pytest

import fedipw
from shown import NOT_RUN, blocks_of

README = Path(__file__).parent.parent / "README.md"
TEXT = README.read_text(encoding="utf-8")


def test_the_strategy_is_made_of_the_columns_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flwr")
    monkeypatch.chdir(tmp_path)
    devices: pl.DataFrame = fedipw.example().devices
    devices.write_parquet("devices.parquet")
    (snippet,) = [block.text for block in blocks_of(README) if "FedIPW(" in block.text]
    made, _, started = snippet.partition("strategy.start(")
    assert started
    assert snippet.startswith(NOT_RUN)
    found: dict[str, object] = {}
    exec(compile(made, str(README), "exec"), found)
    assert type(found["strategy"]).__name__ == "FedIPW"


def test_what_it_links_to_is_there() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)(?:#[^)]*)?\)", TEXT)
    assert "docs/tutorial.md" in links
    for link in links:
        assert (README.parent / link).exists(), link
