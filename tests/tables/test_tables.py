"""Tables and targets on disk."""

from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pytest

from fedipw.errors import InputError
from fedipw.tables import Targets, read_table, write_table


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_table_comes_back_as_it_went(tmp_path: Path, suffix: str) -> None:
    frame = pl.DataFrame(
        {"unit_id": ["007", "8"], "x": [0.1, 1.0 / 3.0], "enrolled": [True, False]}
    )
    write_table(frame, tmp_path / f"t{suffix}")
    assert read_table(tmp_path / f"t{suffix}").equals(frame)
    assert [p.name for p in tmp_path.iterdir()] == [f"t{suffix}"]


def test_unit_ids_of_csv_are_text_and_flags_are_read_in_any_case(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("unit_id,enrolled\n01,True\n02,FALSE\n")
    frame = read_table(path)
    assert frame["unit_id"].to_list() == ["01", "02"]
    assert frame["enrolled"].to_list() == [True, False]
    path.write_text("unit_id,enrolled\n01,1\n02,0\n")
    assert read_table(path)["enrolled"].to_list() == [True, False]
    path.write_text("unit_id,enrolled\n01,maybe\n")
    with pytest.raises(InputError, match="'enrolled' holds 'maybe'"):
        read_table(path)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"No file .*none\.csv"):
        read_table(tmp_path / "none.csv")
    with pytest.raises(InputError, match=r"tables are \.parquet, \.csv"):
        read_table(tmp_path / "t.xlsx")
    whole = tmp_path / "t.parquet"
    write_table(pl.DataFrame({"x": range(1000)}), whole)
    whole.write_bytes(whole.read_bytes()[:500])  # truncated
    with pytest.raises(InputError, match=r"t\.parquet is not a readable parquet table"):
        read_table(whole)
    (tmp_path / "e.csv").write_text("")
    with pytest.raises(InputError, match=r"e\.csv is not a readable csv table"):
        read_table(tmp_path / "e.csv")
    (tmp_path / "d.csv").write_text("a,a\n1,2\n")
    with pytest.raises(InputError, match="column 'a' stands twice"):
        read_table(tmp_path / "d.csv")


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        write_table(pl.DataFrame({"x": [1]}), tmp_path / "no" / "t.csv")
    odd = pl.DataFrame({"x": [[1, 2]]})  # CSV holds no lists
    with pytest.raises(InputError, match=r"t\.csv cannot be written: CSV .* nested"):
        write_table(odd, tmp_path / "t.csv")
    assert list(tmp_path.iterdir()) == []


def test_targets_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("name,value,se\nage,45,0.5\nos[ios],0.3,\n")
    targets = Targets.read(path)
    assert targets.names == ("age", "os[ios]")
    assert targets.values.tolist() == [45.0, 0.3]
    assert targets.se is not None
    assert targets.se.tolist() == [0.5, 0.0]
    path.write_text("name,value\nage,45\n")
    assert Targets.read(path).se is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,mean\nage,1\n", r"no column 'value'; it has name, mean"),
        ("name,value\n", r"There are no targets"),
        ("name,value\nage,\n", r"value of age is missing"),
        ("name,value\nage,old\n", r"row 1, column 'value': 'old' is not a number"),
        ("name,value\nage,1\nage,2\n", r"age: each target must be given once"),
        ("name,value\n,1\n", r"row 1 has no name"),
        ("name,value,se\nage,1,-1\n", r"standard error of age must be a number from 0 to 1e"),
        ("name,value\nos[a],0.7\nos[b],0.300002\n", r"shares of 'os' sum to 1\.000002"),
        ("name,value\nos[a],1.5\n", r"share of a level lies between 0 and 1"),
    ],
)
def test_targets_no_file_can_hold(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        Targets.read(path)
    assert "t.csv" in str(caught.value)


@pytest.mark.parametrize("form", ["dict", "file", "text", "frame", "query", "pandas", "targets"])
def test_targets_in_every_form(tmp_path: Path, form: str) -> None:
    values = {"age": 45.0, "os[ios]": 0.3}
    frame = pl.DataFrame({"name": list(values), "value": list(values.values())})
    path = tmp_path / "t.tsv"
    write_table(frame, path)
    forms: dict[str, Any] = {
        "dict": values,
        "file": path,
        "text": str(path),
        "frame": frame,
        "query": frame.lazy(),
        "pandas": pd.DataFrame(frame.to_dict(as_series=False)),
        "targets": Targets.of(values),
    }
    targets = Targets.given(forms[form])
    assert targets.names == ("age", "os[ios]")
    assert targets.values.tolist() == [45.0, 0.3]


def test_what_are_no_targets_is_told_what_is(tmp_path: Path) -> None:
    for odd in ([("age", 45.0)], 45.0, None):
        with pytest.raises(InputError, match=rf"values by name .*not {type(odd).__name__}\."):
            Targets.given(odd)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="the table given has no column 'value'"):
        Targets.given(pl.DataFrame({"name": ["age"]}))
    with pytest.raises(InputError, match="the table given: The target value of age is missing"):
        Targets.given(pl.DataFrame({"name": ["age"], "value": [None]}))
    with pytest.raises(InputError, match="No file"):
        Targets.given(tmp_path / "none.csv")


def test_shares_may_exceed_one_by_rounding() -> None:
    Targets.of({"os[a]": 0.7, "os[b]": 0.3000005})
