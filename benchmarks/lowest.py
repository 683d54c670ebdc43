"""``python -m benchmarks.lowest``: the tests under the lowest versions that pyproject.toml allows.

Makes an environment of its own, installs each direct dependency at its lower bound, and runs the
tests of tables, selection, calibration, weighting and commands. Needs the network. ``--print`` only
shows what would be installed. Flower has bounds of its own on some of them and is left out.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = ("tests/tables", "tests/numerics", "tests/storage", "tests/selection", "tests/calibration",
         "tests/weighting", "tests/cli")  # fmt: skip
TOOLS = ("pytest", "pytest-xdist", "hypothesis", "jsonschema")
WITH_FLOWER = ("tests/weighting/test_new_choices.py", "tests/weighting/test_properties.py")


def lowest(extras: tuple[str, ...] = ("dask", "real-data")) -> list[str]:
    """Return every direct dependency with its lower bound as its version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"]]
    for extra in extras:
        asked += project["optional-dependencies"][extra]
    return [re.sub(r">=\s*([^,;]+).*", r"==\1", one) for one in asked]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-lowest")
    parser.add_argument("--print", action="store_true", dest="only_print")
    asked = parser.parse_args()
    pinned = lowest()
    print("\n".join(pinned))
    if asked.only_print:
        return 0
    subprocess.run([sys.executable, "-m", "venv", str(asked.venv)], check=True)
    python = asked.venv / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *pinned, *TOOLS], check=True)
    subprocess.run([*pip, "--no-deps", "--editable", str(ROOT)], check=True)
    return subprocess.run(
        # what old releases say of their own dependencies is not ours
        [
            str(python),
            "-m",
            "pytest",
            "-n",
            "2",
            "-W",
            "ignore::DeprecationWarning",
            *TESTS,
            *(f"--ignore={path}" for path in WITH_FLOWER),
        ],
        cwd=ROOT,
        check=False,
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
