"""``python -m benchmarks.outside [PART ...]``: published results of others, and ours beside them.

Parts are ``two-clients``, ``sine``, ``clusters`` and ``cyclic``, all by default. Results go to
benchmarks/results/outside.json, a part at a time; the docs show them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.outside import clusters, cyclic, sine, two_clients
from benchmarks.outside.tables import lines
from fedipw.lab.files import environment

RESULT = Path(__file__).parents[1] / "results" / "outside.json"
PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "two-clients": two_clients.study,
    "clusters": clusters.study,
    "cyclic": cyclic.study,
    "sine": sine.study,
}


def main() -> None:
    """Run the parts that are named and put them into the file."""
    parts = sys.argv[1:] or list(PARTS)
    for part in parts:
        if part not in PARTS:
            raise SystemExit(f"No part {part!r}; there are {', '.join(PARTS)}.")
    for part in parts:
        found = PARTS[part]() | environment()
        saved = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        saved[part] = found
        RESULT.write_text(json.dumps(saved, indent=2) + "\n")
        print("\n".join([part, *lines({part: found})[part]]), flush=True)


if __name__ == "__main__":
    main()
