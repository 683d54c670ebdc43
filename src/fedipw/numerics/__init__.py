"""Checks at the border, compiled elementary functions and the one Newton iteration."""
