"""Text files as people have them: separators, encodings, names of identifiers, odd cells."""

from __future__ import annotations

import gzip
import warnings
from pathlib import Path

import polars as pl
import pytest

import fedipw
from fedipw.errors import FedIPWWarning, InputError
from fedipw.evaluation.logged import Metrics
from fedipw.tables import Ledger, Population, Table, Targets
from fedipw.tables.population import ReferenceSample

ROWS = [("unit_id", "age", "city"), ("007", "30.5", "Orléans, F"), ("b", "61", "北海道")]


def text(mark: str) -> str:
    return "\n".join(mark.join(f'"{c}"' if "," in c else c for c in row) for row in ROWS) + "\n"


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".csv.gz"])
def test_the_separator_is_that_of_the_header(tmp_path: Path, mark: str, suffix: str) -> None:
    path = tmp_path / f"people{suffix}"
    data = text(mark).encode("utf-8-sig")  # with the mark that some programs put first
    path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    frame = Table(path).collect()
    assert frame.schema == {"unit_id": pl.String, "age": pl.Float64, "city": pl.String}
    assert frame.rows() == [("007", 30.5, "Orléans, F"), ("b", 61.0, "北海道")]


def test_a_separator_given_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    path.write_text("unit_id:age,years\na:3\n")
    assert Table(path).schema.names() == ["unit_id:age", "years"]
    assert Table(path, separator=":").collect().rows() == [("a", 3)]
    for wrong in ("", "ab", '"', "\n", "é"):
        with pytest.raises(InputError, match="A separator is one character"):
            Table(path, separator=wrong)


def test_decimal_commas_go_with_other_separators(tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    path.write_text("unit_id;age;city\n1,5;30,5;a,b\nb;61;c\n")
    assert Table(path).collect().rows() == [("1,5", 30.5, "a,b"), ("b", 61.0, "c")]
    path.write_text("unit_id;age;n\na;30,5;1.5\nb;61,1;2.5\n")
    with pytest.raises(InputError, match="commas in column 'age' and decimal points in 'n'"):
        Table(path).collect()


@pytest.mark.parametrize(
    ("encoding", "words"),
    [
        ("latin-1", r"looks like WINDOWS-1252 \(Latin-1\): line 2 has the byte 0xE9, there 'é'"),
        ("utf-16", "looks like UTF-16. Convert it: iconv -f UTF-16 -t UTF-8 people.csv"),
        ("utf-16-le", "looks like UTF-16LE"),
        ("utf-16-be", "looks like UTF-16BE"),
    ],
)
def test_another_encoding_is_named(tmp_path: Path, encoding: str, words: str) -> None:
    path = tmp_path / "people.csv"
    path.write_bytes("unit_id,city\na,Orléans\n".encode(encoding))
    with pytest.raises(InputError, match=rf"people\.csv is not UTF-8; it {words}"):
        Table(path).collect()


ADVICE = ("infer_schema_length", "truncate_ragged", "ignore_errors", "schema_overrides", "Consider")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("unit_id,age\na,1\nb,2,3\n", "line 3 has more fields than the header: 3"),
        ('unit_id,age\na,"1\nb,2\n', "a quote .* is opened and not closed"),
        ("", "empty CSV"),
    ],
)
def test_no_advice_of_the_library_that_reads(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "people.csv"
    path.write_text(content)
    with pytest.raises(InputError, match=words) as raised:
        Table(path).collect()
    assert not any(word in str(raised.value) for word in ADVICE)
    assert "\n" not in str(raised.value)


def test_cells_that_must_be_numbers_are_named(tmp_path: Path) -> None:
    values = [*map(str, range(16)), "n/a", "18"]
    frame = pl.DataFrame({"unit_id": range(18), "round": 1, "value": values})
    frame.write_csv(tmp_path / "loss.csv")
    words = r"loss\.csv: row 17, column 'value': 'n/a' is not a number\.$"
    with pytest.raises(InputError, match=words):
        Metrics.read(tmp_path / "loss.csv")
    means = pl.DataFrame({"name": ["age", "os[ios]"], "value": [41.0, 0.3], "se": ["0.1", "?"]})
    means.write_csv(tmp_path / "targets.csv")
    with pytest.raises(InputError, match=r"targets\.csv: row 2, column 'se': '\?' is not a number"):
        Targets.read(tmp_path / "targets.csv")
    with pytest.raises(InputError, match=r"row 17, column 'value': 'n/a' is not a number"):
        ReferenceSample.of(tmp_path / "loss.csv", "value")
    with pytest.raises(InputError, match=r"loss\.csv: base weights: row 17, column 'value'"):
        fedipw.calibrate(tmp_path / "loss.csv", {"round": 1.0}, base="value")
    rounds = Ledger(tmp_path / "rounds")
    closed = pl.DataFrame({"unit_id": ["a"], "invited": True, "replied": True, "invite_prob": "x"})
    with pytest.raises(InputError, match="row 1, column 'invite_prob': 'x' is not a number"):
        rounds.append(1, closed)


def test_a_column_of_numbers_with_an_odd_cell_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    lines = [f"u{k},{k},z{k % 3},{k % 2}" for k in range(9)]
    lines[4] = "u4,n/a,z1,0"
    path.write_text("unit_id,age,zone,enrolled\n" + "\n".join(lines) + "\n")
    words = r"people\.csv row 5, column 'age': 'n/a' is not a number \(1 of 9 cells are not\)"
    with pytest.warns(FedIPWWarning, match=words) as caught:
        assert Population(path).members.covariates == ("age", "zone")
    assert len(caught) == 1  # of no other column
    with pytest.warns(FedIPWWarning, match=words):
        fedipw.calibrate(path, {"zone[z1]": 0.3})
    path.write_text(path.read_text().replace("n/a", ""))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Population(path).members.frame["age"].null_count() == 0  # u4 is not enrolled


def test_identifiers_may_have_another_name(tmp_path: Path) -> None:
    people = pl.DataFrame({"device": ["01", "2"], "age": [30, 61], "enrolled": [True, False]})
    people.write_csv(tmp_path / "people.csv")
    people.write_parquet(tmp_path / "people.parquet")
    for source in (tmp_path / "people.csv", tmp_path / "people.parquet", people):
        made = Population(source, id="device")
        assert made.members.frame["unit_id"].to_list() == ["01"]
        assert made.covariates == ("age",)
        assert Population.from_totals(source, {"age": 40}, id="device").members.size == 1
        with pytest.raises(InputError, match=r"no column 'phone' of identifiers; it has device"):
            Population(source, id="phone").check()
    both = people.with_columns(unit_id=pl.Series(["x", "y"]))
    with pytest.raises(InputError, match=r"both 'device', which --id .* names, and 'unit_id'"):
        Population(both, id="device")
    slices = Table(tmp_path / "people.csv", id="device").slices(1)
    assert {part.dialect.id for part in slices} == {"device"}  # for workers on other machines


def test_rounds_may_have_the_same_other_name(tmp_path: Path) -> None:
    closed = pl.DataFrame({"unit_id": ["a"], "invited": True, "replied": True, "battery": 0.5})
    Ledger(tmp_path / "usual").append(1, closed)
    (tmp_path / "other").mkdir()
    usual = Ledger(tmp_path / "usual").read(1)
    other = tmp_path / "other" / "round-000001.parquet"
    usual.rename({"unit_id": "device"}).write_parquet(other)
    for name in ("usual", "other"):
        ledger = Ledger(tmp_path / name, id="device")
        assert ledger.covariates == ("battery",)
        assert ledger.read(1).equals(usual)
        assert ledger.scan().collect().equals(usual)
        with pytest.raises(InputError, match="open it without id="):
            ledger.append(2, closed)
    usual.with_columns(device=pl.lit("z")).write_parquet(other)
    with pytest.raises(InputError, match="has both 'device'"):
        Ledger(tmp_path / "other", id="device").read(1)
