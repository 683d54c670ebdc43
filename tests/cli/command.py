"""The command line, run in this process, and the files of a world that commands run on."""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import polars as pl

from fedipw.cli import main
from worlds import Tables, World, drawn


def fedipw(*arguments: object) -> tuple[int, str, str]:
    """Return exit code, output and errors of a command."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["fedipw", *map(str, arguments)]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
        code = 0
    except SystemExit as done:
        code = int(done.code or 0)
    finally:
        sys.argv = before
    return code, out.getvalue(), err.getvalue()


def succeeded(*arguments: object) -> str:
    """Run a command to a good end and return its output."""
    code, out, err = fedipw(*arguments)
    assert code == 0, err
    return out


def strict_json(text: str) -> dict[str, Any]:
    """Return JSON; numbers that JSON does not have are refused."""

    def never(name: str) -> None:
        raise AssertionError(f"{name} in JSON")

    found: dict[str, Any] = json.loads(text, parse_constant=never)
    return found


def contents(folder: Path) -> dict[Path, bytes]:
    """Return what lies in a directory; directories are there without bytes."""
    return {p: p.read_bytes() if p.is_file() else b"" for p in sorted(folder.rglob("*"))}


@dataclass
class Files(Tables):
    """The tables of a world and the directory they lie in, to be spoilt and run."""

    where: Path = field(kw_only=True)

    @classmethod
    def of(cls, world: World, where: Path) -> Self:
        return cls(**vars(drawn(world)), where=where)

    def put(self, kind: str = "parquet") -> Self:
        self.write(self.where, kind)
        return self

    def edit(self, index: int, **columns: pl.Expr) -> None:
        """Change columns of one round, counted from 1."""
        self.rounds = self.changed(index, **columns).rounds

    def edit_all(self, *columns: pl.Expr, **named: pl.Expr) -> None:
        """Change columns of every round."""
        self.rounds = [table.with_columns(*columns, **named) for table in self.rounds]

    def targets(self, *lines: str, head: str = "name,value") -> None:
        (self.where / "targets.csv").write_text("\n".join([head, *lines, ""]))

    def round(self, index: int) -> Path:
        return self.where / "rounds" / f"round-{index:06d}.parquet"

    def given(
        self, source: str = "population", *, rounds: bool = True, kind: str = "parquet"
    ) -> list[object]:
        """Return the options that name the population and the rounds."""
        known: list[object] = ["--population", self.where / f"people.{kind}"]
        if source != "population":
            known = ["--enrolled", self.where / f"enrolled.{kind}"]
        if source == "targets":
            known += ["--targets", self.where / "targets.csv"]
        if source == "reference":
            known += ["--reference", self.where / "sample.parquet"]
            known += ["--reference-weight", "design_weight"]
        return [*known, "--rounds", self.where / "rounds"] if rounds else known

    def listing(self) -> dict[Path, bytes]:
        return contents(self.where)

    def weights(self, *options: object, out: str = "w.csv", **given: Any) -> tuple[int, str, str]:
        """Return exit code, output and errors of ``fedipw weights``, over an earlier output."""
        place = ("--out", self.where / out, "--force")
        return fedipw("weights", *self.given(**given), *place, *options)

    def weighed(self, *options: object, **given: Any) -> tuple[pl.DataFrame, dict[str, Any]]:
        """Return the weights and the summary."""
        code, out, err = self.weights(*options, "--json", out="w.parquet", **given)
        assert code == 0, err
        return pl.read_parquet(self.where / "w.parquet"), strict_json(out)

    def evaluate(
        self, *options: object, metrics: str = "loss.parquet", **given: Any
    ) -> tuple[int, str, str]:
        """Return exit code, output and errors of ``fedipw evaluate``."""
        told = ("--metrics", self.where / metrics)
        return fedipw("evaluate", *self.given(**given), *told, *options)

    def evaluated(self, *options: object, **given: Any) -> dict[str, Any]:
        """Return the JSON of an evaluation."""
        code, out, err = self.evaluate(*options, "--json", **given)
        assert code == 0, err
        return strict_json(out)
