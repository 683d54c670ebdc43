"""Metrics of the target population from replies: estimates, and how far to trust them."""
