"""Handwritten digits as a Flower app."""
