"""The command line, run in this process."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout

from fedipw.cli import main


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
