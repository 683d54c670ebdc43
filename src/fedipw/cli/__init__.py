"""The command line: parse, call, exit code; nothing else."""

from fedipw.cli.main import main

__all__ = ["main"]
