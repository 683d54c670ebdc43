"""Run the command line with ``python -m fedipw``."""

from fedipw.cli.main import main

main()
