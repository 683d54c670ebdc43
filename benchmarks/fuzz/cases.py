"""Cases: which command runs on which inputs with which options, and what its result must be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, cast

import numpy as np
import polars as pl

from benchmarks.fuzz import oracle
from benchmarks.fuzz.inputs import BASES, Inputs, base, changed_json, damage, mutated
from benchmarks.fuzz.values import NUMBERS, WHOLE, Rng, one_of, text

SCHEMES = (
    "fedipw", "fedipw-hajek", "fedavg", "participation-only", "calibrated-quadratic",
    "calibrated-entropy-hajek", "calibrated-logit", "efficient", "collapsed", "greg",
    "calibrated-online", "augmented", "oracle",
)  # fmt: skip
TERMS = (
    "age",
    "os",
    "rooms",
    "battery",
    "age**2",
    "age:os",
    "C(rooms)",
    "os[ios]",
    "ns(age, 20, 40, 60)",
    ".",
)
SIGNS = (" + ", " - ", "*", ":", "**", " ", "", "[", "]", "(", ")", "`", ",", "++")


@dataclass
class Case:
    """One call of a command, or of something that reads files, and how its result is judged."""

    kind: str
    arguments: list[object] = field(default_factory=list)
    outputs: set[str] = field(default_factory=set)
    judge: Callable[[Path, str, Call], Iterator[str]] | None = None
    direct: Callable[[], object] | None = None  # in place of a command
    about: str = ""


Call = Callable[..., tuple[int, str, str]]


def formula(rng: Rng) -> str:
    """Return a formula: valid, made of parts at random, or long."""
    kind = int(rng.integers(10))
    if kind < 5:
        return " + ".join(one_of(rng, TERMS[:-1]) for _ in range(int(rng.integers(1, 4))))
    if kind < 8:
        parts = [
            one_of(rng, (*TERMS, *SIGNS, text(rng)[:50])) for _ in range(int(rng.integers(1, 9)))
        ]
        return "".join(parts)
    return one_of(rng, (
        "age**" + "9" * 5000, "os[" + " " * 8000, "[" * 3000, "`" * 3001, "*".join(["age"] * 30),
        ":".join(["os"] * 30), "+".join(["age"] * 3000), "a" * 50_000,
        "ns(age" + ", 1" * 2000 + ")",
        "age**0", "age**-1", "age**1.5", "C(age)**2", "- age", ". - .", "ns(age, 1e308, -1e308)",
        "ns(age, 0, 1e-320)", "ns(age, -1e308, 1e308)", "os[\u202eios]", "age**101", "age**100",
    ))  # fmt: skip


def number(rng: Rng) -> str:
    """Return a number as an option."""
    if rng.random() < 0.3:
        return str(one_of(rng, WHOLE))
    return repr(one_of(rng, NUMBERS))


_OPTIONS: Mapping[str, Callable[[Rng], list[str]]] = {
    "--enrollment": lambda rng: [formula(rng)],
    "--participation": lambda rng: [formula(rng)],
    "--availability": lambda rng: [formula(rng)],
    "--history": lambda rng: [],
    "--day-length": lambda rng: [number(rng)],
    "--day-hours": lambda rng: [number(rng)],
    "--classifier": lambda rng: [
        one_of(rng, ("logistic", "nonsense", "os.system", text(rng)[:40]))
    ],
    "--folds": lambda rng: [one_of(rng, ("0", "2", "1", "-1", "100000", "nan"))],
    "--score-calibration": lambda rng: [one_of(rng, ("platt", "isotonic", "x"))],
    "--missing": lambda rng: [one_of(rng, ("error", "indicator", "drop", "x"))],
    "--base": lambda rng: [one_of(rng, ("rooms", "age", "os", "x"))],
    "--totals": lambda rng: [],
    "--l2": lambda rng: [number(rng)],
    "--lump-below": lambda rng: [number(rng)],
    "--soft": lambda rng: [],
}
_WEIGHING: Mapping[str, Callable[[Rng], list[str]]] = {
    **_OPTIONS,
    "--scheme": lambda rng: [one_of(rng, (*SCHEMES, "x", text(rng)[:40], "base=participation"))],
    "--participation-fit": lambda rng: [one_of(rng, ("past", "pooled", "same-round", "x"))],
    "--window": lambda rng: [one_of(rng, ("1", "2", "0", "-1", str(10**30)))],
    "--decay": lambda rng: [one_of(rng, ("0.9", "1", "1e-300", "0", number(rng)))],
    "--refit-every": lambda rng: [one_of(rng, ("1", "3", "0", str(10**30)))],
    "--models-table": lambda rng: [],
    "--threshold": lambda rng: [number(rng)],
    "--strict": lambda rng: [number(rng)],
}


def _given(
    rng: Rng, options: Mapping[str, Callable[[Rng], list[str]]], most: int
) -> dict[str, list[str]]:
    count = int(rng.integers(0, most + 1))
    return {
        name: options[name](rng) for name in {one_of(rng, tuple(options)) for _ in range(count)}
    }


def _flat(options: Mapping[str, list[str]]) -> list[str]:
    return [part for name, values in options.items() for part in (name, *values)]


def _prepared(rng: Rng, used: tuple[str, ...]) -> tuple[Inputs, bool]:
    """Return inputs, and whether they are valid but for one change."""
    inputs = base(int(rng.integers(BASES))).copy()
    if rng.random() < 0.15:
        inputs.suffix = ".csv"
    gentle = bool(rng.random() < 0.5)
    for _ in range(1 if gentle else int(rng.integers(1, 5))):
        mutated(inputs, rng, used)
    return inputs, gentle


def _source(rng: Rng, where: Path, inputs: Inputs) -> tuple[list[object], str]:
    kind, suffix = one_of(rng, ("table", "table", "totals", "sample")), inputs.suffix
    if kind == "table":
        return ["--population", where / f"people{suffix}"], kind
    known: list[object] = ["--enrolled", where / f"enrolled{suffix}"]
    if kind == "sample":
        more = ["--reference", where / f"sample{suffix}", "--reference-weight", "design_weight"]
        return [*known, *more], kind
    known += ["--targets", _targets(where)]
    return [*known, "--population-size", "1000"] if rng.random() < 0.5 else known, kind


def _targets(where: Path) -> Path:
    path = where / "targets.csv"
    return path if path.exists() or path.is_symlink() else where / "targets.parquet"


def weights_case(rng: Rng, where: Path) -> Case:
    used = (
        "people",
        "people",
        "enrolled",
        "sample",
        "rounds",
        "rounds",
        "rounds",
        "targets",
        "files",
        "options",
    )
    inputs, gentle = _prepared(rng, used)
    inputs.write(where)
    source, kind = _source(rng, where, inputs)
    asked = _given(rng, _WEIGHING, 1 if gentle else 4)
    if "--scheme" not in asked and rng.random() < 0.5:
        asked["--scheme"] = [one_of(rng, SCHEMES[:6])]
    out = one_of(rng, ("w.parquet", "w.csv", "w.parquet", "w.csv.gz", "w.feather"))
    scheme = asked.get(
        "--scheme", ["fedipw-hajek" if kind != "totals" else "calibrated-entropy-hajek"]
    )[0]

    def judge(folder: Path, _: str, __: Call) -> Iterator[str]:
        table = {"w.parquet": pl.read_parquet, "w.feather": pl.read_ipc}.get(out, _read_csv)(
            folder / out
        )
        plain = kind == "table" and asked.get("--missing", ["error"])[0] == "error"
        size = _rows_of(folder / f"people{inputs.suffix}") if plain else None
        known = not asked.keys() & {"--trim", "--base"} and ("+" not in scheme)
        yield from oracle.weights(table, folder, scheme if known else "", size)

    arguments = [
        "weights",
        *source,
        "--rounds",
        where / "rounds",
        "--out",
        where / out,
        *_flat(asked),
    ]
    return Case("weights", arguments, {out}, judge, about="; ".join(inputs.changed))


def _read_csv(path: Path) -> pl.DataFrame:
    return pl.read_csv(path, schema_overrides={"unit_id": pl.String}, infer_schema_length=None)


def _rows_of(path: Path) -> int:
    return (pl.read_parquet(path) if path.suffix == ".parquet" else _read_csv(path)).height


_BOUNDS = ("0.2,5", "1,1", "nan,nan", "-1e308,1e308", "x", "0,1e-320")


def calibrate_case(rng: Rng, where: Path) -> Case:
    inputs, gentle = _prepared(rng, ("people", "people", "targets", "targets", "files", "options"))
    if rng.random() < 0.3:
        inputs.targets = inputs.targets.with_columns(se=pl.lit(one_of(rng, NUMBERS)))
    inputs.write(where)
    distance = one_of(rng, ("quadratic", "entropy", "logit", "linear", "inverse-logit"))
    asked: dict[str, list[str]] = {"--distance": [distance]}
    if distance == "logit":
        asked["--bounds"] = ["0.01,50"]
    if distance == "inverse-logit":
        asked["--population-size"] = ["1000"]
    if not gentle:
        more: Mapping[str, Callable[[Rng], list[str]]] = {
            "--base": lambda rng: [one_of(rng, ("rooms", "age", "os", "x"))],
            "--bounds": lambda rng: [one_of(rng, _BOUNDS)],
            "--population-size": lambda rng: [number(rng)],
            "--slack": lambda rng: [number(rng)],
            "--totals": lambda rng: [],
        }  # fmt: skip
        asked |= _given(rng, more, 2)
    units, targets = where / f"people{inputs.suffix}", _targets(where)
    out = one_of(rng, ("c.parquet", "c.parquet", units.name, targets.name, "no/where.csv", "c.txt"))

    def judge(folder: Path, said: str, __: Call) -> Iterator[str]:
        people = pl.read_parquet(units) if units.suffix == ".parquet" else _read_csv(units)
        wanted = pl.read_csv(targets) if targets.suffix == ".csv" else pl.read_parquet(targets)
        changed = "--slack" in asked or "--totals" in asked or "rescaled to sum to" in said
        if "se" in wanted.columns or changed:
            wanted = wanted.clear()
        made = pl.read_parquet(folder / out)
        negative = distance in {"linear", "quadratic"} and "--bounds" in asked
        flags = people
        if "enrolled" in people.columns:
            words = pl.col("enrolled").cast(pl.String).str.to_lowercase().str.strip_chars()
            flags = people.with_columns(words.is_in(["true", "1", "yes", "1.0"]))
        yield from oracle.calibration(
            made, flags, wanted, negative=negative or distance == "linear"
        )

    arguments = ["calibrate", units, "--targets", targets, "--out", where / out, *_flat(asked)]
    outputs = {out} if out == "c.parquet" else set()
    return Case("calibrate", arguments, outputs, judge, about="; ".join(inputs.changed))


def evaluate_case(rng: Rng, where: Path) -> Case:
    used = ("people", "metrics", "metrics", "rounds", "rounds", "targets", "files", "options")
    inputs, gentle = _prepared(rng, used)
    inputs.write(where)
    source, kind = _source(rng, where, inputs)
    metrics = where / f"metrics{inputs.suffix}"
    more: Mapping[str, Callable[[Rng], list[str]]] = {
        **_OPTIONS,
        "--scheme": lambda rng: [one_of(rng, SCHEMES)],
        "--by": lambda rng: [one_of(rng, ("os", "rooms", "round", "x", "age"))],
        "--sensitivity": lambda rng: [number(rng)],
        "--conclusion": lambda rng: [number(rng)],
        "--samples": lambda rng: [],
        "--jackknife": lambda rng: [one_of(rng, ("5", "2", "1", "-3", "100000"))],
        "--confidence": lambda rng: [number(rng)],
        "--missing-metrics": lambda rng: [],
        "--quantile": lambda rng: [one_of(rng, ("0.5", "0.99", "0.001", number(rng)))],
        "--ratio-to": lambda rng: [str(metrics)],
        "--total": lambda rng: [],
        "--difference": lambda rng: [one_of(rng, ("rest", "pairs", "os=ios", "x", "=", "a=b=c"))],
        "--replicate-weights": lambda rng: [str(where / "rep.csv")],
        "--replicates": lambda rng: [one_of(rng, ("2", "5", "0", "-1", str(10**30)))],
        "--interval": lambda rng: [
            one_of(rng, ("auto", "t", "logit", "beta", "jeffreys", "bootstrap", "x"))
        ],
        "--resamples": lambda rng: [one_of(rng, ("100", "1", "0", "-1", str(10**30)))],
        "--proportion": lambda rng: [],
        "--cluster": lambda rng: [one_of(rng, ("os", "rooms", "age", "unit_id", "x"))],
        "--predict": lambda rng: [one_of(rng, ("linear", "x", "os.system", text(rng)[:40]))],
        "--seed": lambda rng: [one_of(rng, ("1", "-1", str(10**30)))],
    }
    asked = _given(rng, more, 1 if gentle else 4)

    def judge(folder: Path, out: str, call: Call) -> Iterator[str]:
        found = oracle.strict_json(out)
        if kind != "table" or asked.keys() - {
            "--by",
            "--enrollment",
            "--participation",
            "--history",
        }:
            return
        again = ["weights", *source, "--rounds", folder / "rounds", "--scheme", "fedipw",
                 "--participation-fit", "pooled", "--out", folder / "pooled.parquet"]  # fmt: skip
        again += _flat({n: v for n, v in asked.items() if n != "--by"})
        if call(*again)[0] == 0:
            pooled = pl.read_parquet(folder / "pooled.parquet")
            table = pl.read_parquet(metrics) if metrics.suffix == ".parquet" else _read_csv(metrics)
            size = _rows_of(folder / f"people{inputs.suffix}")
            yield from oracle.means(found["estimates"], pooled, table, size)

    arguments = [
        "evaluate",
        *source,
        "--rounds",
        where / "rounds",
        "--metrics",
        metrics,
        "--json",
        *_flat(asked),
    ]
    outputs = {"rep.csv"} if "--replicate-weights" in asked else set()
    return Case("evaluate", arguments, outputs, judge, about="; ".join(inputs.changed))


def audit_case(rng: Rng, where: Path) -> Case:
    used = (
        "people",
        "people",
        "enrolled",
        "metrics",
        "rounds",
        "rounds",
        "targets",
        "files",
        "options",
    )
    inputs, gentle = _prepared(rng, used)
    inputs.write(where)
    source, _ = _source(rng, where, inputs)
    more = {
        **{name: made for name, made in _WEIGHING.items() if name != "--models-table"},
        "--cluster": lambda rng: [one_of(rng, ("os", "rooms", "age", "x"))],
        "--title": lambda rng: [text(rng)[:300]],
        "--min-cell": lambda rng: [str(one_of(rng, WHOLE))],
    }
    asked = _given(rng, more, 1 if gentle else 3)
    rounds: list[object] = ["--rounds", where / "rounds"] if rng.random() < 0.8 else []
    if rounds and rng.random() < 0.5:
        rounds += ["--metrics", where / f"metrics{inputs.suffix}", "--metric-name", text(rng)[:100]]

    def judge(folder: Path, _: str, __: Call) -> Iterator[str]:
        oracle.strict_json((folder / "a.json").read_text(encoding="utf-8"))
        yield from oracle.page((folder / "a.html").read_text(encoding="utf-8"))

    arguments = [
        "audit",
        *source,
        *rounds,
        "--out",
        where / "a.html",
        "--json",
        where / "a.json",
        *_flat(asked),
    ]
    return Case("audit", arguments, {"a.html", "a.json"}, judge, about="; ".join(inputs.changed))


SCENARIO = """seed = 3
rounds = 4
methods = ["fedavg", "fedipw"]
[population]
kind = "testbed"
size = 60
rows = 6
features = 3
[participation]
kind = "daily"
[training]
local_steps = 2
step_size = 0.3
batch_size = 4
server_step = 1.0
l2 = 0.05
[propensity]
window = "past"
"""
STUDY = """title = "t"
rounds = 3
seeds = [1, 2]
methods = ["fedavg", "participation-only"]
[base.population]
size = 50
rows = 5
features = 2
[scenarios.a]
"""
_VALUES = (
    "{a = 0.8}", "[1]", "[]", '"x"', '""', "true",
    "1979-05-27", "nan", "inf", "-inf", "1e30", "1e308",
    "1" + "0" * 30,
    "-1", "0", "0.0", "1.5", "1e-320", "9" * 5000, '"\\u202e"', "[[[[1]]]]", "9223372036854775807",
    "2147483648",
)  # fmt: skip


def changed_toml(whole: str, rng: Rng) -> tuple[str, str]:
    """Return a TOML file with a value, a key or some bytes changed, and the change in words."""
    lines = whole.split("\n")
    kind = int(rng.integers(8))
    settings = [k for k, line in enumerate(lines) if "=" in line]
    at = one_of(rng, settings)
    key = lines[at].split(" = ")[0]
    if kind < 5:
        value = one_of(rng, _VALUES)
        lines[at] = f"{key} = {value}"
        return "\n".join(lines), f"{key} = {value[:40]}"
    if kind == 5:
        lines[at] = lines[at].replace(key, key + "x")
        return "\n".join(lines), f"{key}x"
    if kind == 6:
        del lines[at]
        return "\n".join(lines), f"no {key}"
    raw = bytearray("\n".join(lines).encode())
    raw[int(rng.integers(len(raw)))] ^= 1 << int(rng.integers(7))
    return raw.decode(errors="replace"), "a bit flipped"


def lab_case(rng: Rng, where: Path) -> Case:
    study = bool(rng.random() < 0.15)
    made, about = changed_toml(STUDY if study else SCENARIO, rng)
    (where / "a.toml").write_text(made, encoding="utf-8")

    def judge(folder: Path, _: str, __: Call) -> Iterator[str]:
        for path in (folder / "o").glob("*.json"):
            oracle.strict_json(path.read_text(encoding="utf-8"))
        for path in (folder / "o").glob("*.parquet"):
            pl.read_parquet(path)
        yield from oracle.page((folder / "o" / "index.html").read_text(encoding="utf-8"))

    command: list[object] = [
        "study" if study else "simulate",
        where / "a.toml",
        "--out",
        where / "o",
    ]
    if study:
        command += ["--workers", "1"]
    return Case(str(command[0]), command, {"o"}, judge, about=about)


@cache
def _saved_models() -> dict[str, Any]:
    """Return the models of a run, made once."""
    from benchmarks.fuzz.run import called

    folder = Path(mkdtemp(prefix="fuzz-models-"))
    base(1).copy().write(folder)
    who = ("--population", folder / "people.parquet", "--rounds", folder / "rounds")
    code, _, err = called("weights", *who,
                          "--out", folder / "w.csv", "--save-models", folder / "m")  # fmt: skip
    assert code == 0, err
    found = {
        path.name: json.loads(path.read_text()) for path in sorted((folder / "m").glob("*.json"))
    }
    shutil.rmtree(folder)
    return found


def model_case(rng: Rng, where: Path) -> Case:
    base(1).copy().write(where)
    (where / "m").mkdir()
    models = dict(_saved_models())
    name = one_of(rng, tuple(models))
    models[name] = changed_json(models[name], rng)
    for file, saved in models.items():
        (where / "m" / file).write_text(json.dumps(saved))
    if rng.random() < 0.3:
        damage(where / "m" / name, rng)

    def judge(folder: Path, _: str, __: Call) -> Iterator[str]:
        table = pl.read_parquet(folder / "w.parquet")
        yield from oracle.weights(table, folder, "fedipw-hajek", None)

    arguments = ["weights", "--population", where / "people.parquet", "--rounds", where / "rounds",
                 "--models", where / "m", "--out", where / "w.parquet"]  # fmt: skip
    return Case("models", arguments, {"w.parquet"}, judge, about=f"saved model {name}")


@cache
def _checkpoints() -> tuple[bytes, bytes]:
    """Return the checkpoint of a simulation and of a model on Flower, made once."""
    from flwr.app import ArrayRecord

    from benchmarks.fuzz.run import called
    from fedipw.flower.journal import Journal

    folder = Path(mkdtemp(prefix="fuzz-checkpoint-"))
    (folder / "a.toml").write_text(SCENARIO)
    code, _, err = called("simulate", folder / "a.toml", "--out", folder / "o")
    assert code == 0, err
    journal = Journal(folder / "j", {"a": 1})
    journal.save_model(3, ArrayRecord([np.ones((2, 3)), np.zeros(3)]), {"inner": {}, "rounds": 3})
    found = next((folder / "o" / "checkpoint").glob("*.npz")), next((folder / "j").glob("*.npz"))
    made = found[0].read_bytes(), found[1].read_bytes()
    shutil.rmtree(folder)
    return made


def checkpoint_case(rng: Rng, where: Path) -> Case:
    simulated, flower = _checkpoints()
    live = bool(rng.random() < 0.5)
    folder = where / ("j" if live else "o/checkpoint")
    folder.mkdir(parents=True)
    path = folder / ("round-000003.npz" if live else "checkpoint.npz")
    path.write_bytes(flower if live else simulated)
    if rng.random() < 0.5:
        damage(path, rng)
    else:
        _change_header(path, rng)
    if live:

        def load() -> object:
            from fedipw.flower.journal import Journal

            return Journal(folder, {"a": 1}).load_model(3)

        return Case("flower checkpoint", direct=load, about="Flower checkpoint")
    (where / "a.toml").write_text(SCENARIO)

    def judge(out: Path, _: str, __: Call) -> Iterator[str]:
        oracle.strict_json((out / "o" / "summary.json").read_text(encoding="utf-8"))
        yield from ()

    arguments = ["simulate", where / "a.toml", "--out", where / "o", "--resume"]
    return Case("checkpoint", arguments, {"o"}, judge, about="checkpoint")


def _change_header(path: Path, rng: Rng) -> None:
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    name = one_of(rng, tuple(arrays))
    if name == "header" or rng.random() < 0.6:
        header = json.loads(arrays["header"].tobytes())
        made = json.dumps(changed_json(header, rng))
        arrays["header"] = np.frombuffer(made.encode(), dtype=np.uint8)
    else:
        kind = int(rng.integers(4))
        if kind == 0:
            del arrays[name]
        elif kind == 1:
            arrays[name] = np.array(one_of(rng, NUMBERS))
        elif kind == 2:
            arrays[name] = arrays[name].ravel()[: arrays[name].size // 2]
        else:
            arrays[name] = np.array(["x", "y"])
    with path.open("wb") as file_out:
        np.savez(file_out, **cast("dict[str, Any]", arrays))


@cache
def _audits() -> tuple[str, str]:
    from benchmarks.fuzz.run import called

    folder = Path(mkdtemp(prefix="fuzz-audit-"))
    base(1).copy().write(folder)
    who = ("--population", folder / "people.parquet", "--rounds", folder / "rounds")
    code, _, err = called("audit", *who,
                          "--out", folder / "a.html", "--json", folder / "a.json")  # fmt: skip
    assert code == 0, err
    made = (folder / "a.html").read_text(), (folder / "a.json").read_text()
    shutil.rmtree(folder)
    return made


def compare_case(rng: Rng, where: Path) -> Case:
    page, numbers = _audits()
    (where / "before.json").write_text(numbers)
    made = json.dumps(changed_json(json.loads(numbers), rng))
    after = where / one_of(rng, ("after.json", "after.html"))
    after.write_text(made if after.suffix == ".json" else page)
    if after.suffix == ".html" or rng.random() < 0.2:
        damage(after, rng)

    def judge(folder: Path, _: str, __: Call) -> Iterator[str]:
        yield from oracle.page((folder / "c.html").read_text(encoding="utf-8"))

    arguments = ["audit", "--compare", where / "before.json", after, "--out", where / "c.html"]
    return Case("compare", arguments, {"c.html"}, judge, about=f"compare {after.name}")


def parse_case(rng: Rng, where: Path) -> Case:
    """Return a formula, read by itself; no files."""
    del where
    from fedipw.tables.design import Missing, bound_design

    made, frame = formula(rng), base(int(rng.integers(BASES))).tables["people"]
    missing = one_of(rng, tuple(Missing))

    def bind() -> object:
        return bound_design(made, frame.lazy(), frame.columns[1:], missing=missing).rows(
            frame, "people"
        )

    return Case("formula", direct=bind, about=f"formula {made[:60]!r}")


KINDS: tuple[tuple[Callable[[Rng, Path], Case], float], ...] = (
    (weights_case, 0.34), (calibrate_case, 0.22), (evaluate_case, 0.12), (audit_case, 0.08),
    (lab_case, 0.06),
    (model_case, 0.05), (checkpoint_case, 0.05), (compare_case, 0.02), (parse_case, 0.06),
)  # fmt: skip


def case_of(rng: Rng, where: Path) -> Case:
    """Return a case of any kind, its inputs written."""
    shares = np.array([share for _, share in KINDS])
    return KINDS[int(rng.choice(len(KINDS), p=shares / shares.sum()))][0](rng, where)
