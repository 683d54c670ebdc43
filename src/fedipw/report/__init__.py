"""Figures and self-contained pages."""
