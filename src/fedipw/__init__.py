"""Federated learning that serves the target population."""
