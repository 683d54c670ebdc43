"""Commands run one after the other in one process, as ``python -m fedipw.cli`` runs each.

``python -P batch.py CHECKOUT JOBS``: most of a small command's time is the import of libraries.
Only the standard library is imported here. JOBS is a JSON file, a list of ``arguments`` and the
directory ``out``, in which standard output, standard error and the exit code are left.
"""

from __future__ import annotations

import json
import runpy
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    checkout, jobs = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    found = find_spec("fedipw")
    if found is None or not Path(str(found.origin)).is_relative_to(checkout):
        sys.exit(f"fedipw comes from {found and found.origin}, not from {checkout}.")
    for job in jobs:
        out = Path(job["out"])
        with (
            (out / "stdout.json").open("w") as said,
            (out / "stderr.txt").open("w") as told,
            redirect_stdout(said),
            redirect_stderr(told),
        ):
            code = run(job["arguments"])
        (out / "code").write_text(str(code))


def run(arguments: list[str]) -> int:
    """Return the exit code of one command."""
    sys.argv = ["fedipw", *arguments]
    try:
        runpy.run_module("fedipw.cli", run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main()
