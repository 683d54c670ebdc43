"""``python -m benchmarks.outside [PART ...]``: published results of others, and ours beside them.

Parts are ``two-clients``, ``clusters``, ``cyclic`` and ``sine``, all by default, ``tables`` none of
them. Results go to benchmarks/results/outside.json, a part at a time; the tables and the figure
of the docs are then made from the file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.outside import clusters, cyclic, sine, two_clients
from benchmarks.outside.figure import draw
from benchmarks.outside.tables import lines
from fedipw.lab.files import environment

RESULT = Path(__file__).parents[1] / "results" / "outside.json"
STATIC = Path(__file__).parents[2] / "docs" / "_static"
PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "two-clients": two_clients.study,
    "clusters": clusters.study,
    "cyclic": cyclic.study,
    "sine": sine.study,
}


def main() -> None:
    """Run the parts that are named and put them into the file."""
    parts = [part for part in sys.argv[1:] or PARTS if part != "tables"]
    for part in parts:
        if part not in PARTS:
            raise SystemExit(f"No part {part!r}; there are {', '.join(PARTS)}, and tables.")
    for part in parts:
        found = PARTS[part]() | environment()
        saved = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        saved[part] = found
        RESULT.write_text(json.dumps(saved, indent=2) + "\n")
        print("\n".join([part, *lines({part: found})[part]]), flush=True)
    saved = json.loads(RESULT.read_text())
    for part, table in lines(saved).items():
        (STATIC / f"outside-{part}.md").write_text("\n".join(table) + "\n")
    if set(saved) == set(PARTS):
        draw(saved, STATIC / "outside.png")


if __name__ == "__main__":
    main()
