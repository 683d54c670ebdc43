"""The tutorial, followed to the letter with nothing but the wheel, and its notebook."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from shown import ROOT, follow, in_terminal

STREAMS = ("stdout", "stderr")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory in which the wheel is installed, without what it depends on."""
    folder = tmp_path_factory.mktemp("wheel")
    build = ["-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run([sys.executable, *build], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    options = ["--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check", "--quiet"]
    install = ["-m", "pip", "install", *options, "--target", str(folder / "site"), str(wheel)]
    subprocess.run([sys.executable, *install], check=True, capture_output=True)
    return folder / "site"


def test_the_tutorial_works_from_an_empty_directory(installed: Path, tmp_path: Path) -> None:
    programs = [str(installed / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    where = {"PYTHONPATH": str(installed), "PATH": os.pathsep.join(programs)}
    run = partial(in_terminal, environment=where)
    home = run("python -c 'import fedipw; print(fedipw.__file__)'", tmp_path)
    assert Path(home.strip()) == installed / "fedipw" / "__init__.py"
    assert run("command -v fedipw", tmp_path).strip() == str(installed / "bin" / "fedipw")
    assert not list(tmp_path.iterdir())
    assert follow(ROOT / "docs" / "tutorial.md", tmp_path, run) >= 10
    assert (tmp_path / "audit.html").stat().st_size > 10_000


def test_the_notebook_runs_and_draws(tmp_path: Path) -> None:
    notebook: Any = nbformat.read(ROOT / "docs" / "tutorial.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code), "strip the outputs"
    place = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, resources=place).execute()  # raises what a cell raises
    outputs = [output for cell in code for output in cell.outputs]
    assert sum("image/png" in x.get("data", {}) for x in outputs) == 4
    stream = {name: "".join(x.text for x in outputs if x.get("name") == name) for name in STREAMS}
    assert stream["stdout"].splitlines() == [
        "0.0760 to 0.0791; the truth is 0.0779",
        "FedAvg: 0.730",
        "FedIPW: 0.696",
        "truth: 0.694",
    ]
    # a machine may have no font for the names of some regions; nothing else is worth a warning
    warnings = [line for line in stream["stderr"].splitlines() if "Warning: " in line]
    assert all("Glyph" in line for line in warnings), stream["stderr"]
