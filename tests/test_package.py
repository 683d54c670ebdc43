"""The package as an index would get it: built, checked, installed alone, and run."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*arguments: object, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        check=False, capture_output=True, text=True, env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_all_that_is_imported_is_asked_for() -> None:
    """An import that another package happens to bring is gone one day."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = settings["optional-dependencies"]
    asked = [
        *settings["dependencies"],
        *(n for e, deps in extras.items() if e != "dev" for n in deps),
    ]
    names = {re.split(r"[\[<>=]", one)[0].replace("-", "_") for one in asked}
    names |= {"sklearn", "dask", "Crypto"}  # scikit-learn; with distributed; pycryptodome
    names |= set(sys.stdlib_module_names)
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                found = [node.module or ""]
            for name in found:
                assert name.partition(".")[0] in names | {"fedipw"}, f"{path.name}: {name}"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the sdist, and the wheel that was built from it."""
    out = tmp_path_factory.mktemp("dist")
    run("-m", "build", "--no-isolation", "--outdir", out, ROOT)
    (source,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return source, wheel


def test_both_pass_the_checks_of_an_index(built: tuple[Path, Path]) -> None:
    said = run("-m", "twine", "check", "--strict", *built)
    assert said.count("PASSED") == 2


def test_they_hold_what_they_should(built: tuple[Path, Path]) -> None:
    source, wheel = built
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
        (place,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata = packed.read(place).decode()
    assert {"fedipw/py.typed", "fedipw/__main__.py", "fedipw/audit/templates/audit.html"} <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert not any(name.startswith("tests/") for name in names)
    for line in ("License-Expression: Apache-2.0", "Description-Content-Type: text/markdown",
                 "Classifier: Typing :: Typed", "Requires-Python: >=3.11"):  # fmt: skip
        assert line in metadata.splitlines()
    with tarfile.open(source) as packed_source:
        inside = {name.partition("/")[2] for name in packed_source.getnames()}
    assert {"README.md", "LICENSE", "Makefile", "tests/worlds.py", "src/fedipw/py.typed"} <= inside


def test_the_wheel_alone_runs(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Beside the other packages of this environment, from where nothing of the project is seen."""
    place = tmp_path / "installed"
    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile",
        "--disable-pip-version-check", "--target", place, built[1])  # fmt: skip
    code = "import fedipw; print(fedipw.__file__)"
    assert run("-c", code, PYTHONPATH=str(place)).startswith(str(place))
    said = run("-m", "fedipw", "--version", PYTHONPATH=str(place))
    assert said == f"fedipw {version('fedipw')}\n"
    world = tmp_path / "world"
    assert "fedipw audit " in run("-m", "fedipw", "example", "--out", world, PYTHONPATH=str(place))
    assert (world / "devices.csv").stat().st_size > 100_000
