"""Run the command line with ``python -m fedipw.cli``."""

from fedipw.cli.main import main

main()
