"""Scenarios, the paper's figure, and runs from a configuration file."""
