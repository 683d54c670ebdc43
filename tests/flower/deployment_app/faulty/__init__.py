"""Clients that fail in every way, and the server that goes on."""
