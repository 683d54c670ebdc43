"""A fuzzer of our own: odd and broken inputs for every command, and an oracle for silent errors.

``python -m benchmarks.fuzz --cases 20000`` runs cases in process. Case k of a seed is always the
same, so ``--only K`` runs one again. Half of the cases are valid inputs with one mutation, so that
they get past the checks at the door.
"""
