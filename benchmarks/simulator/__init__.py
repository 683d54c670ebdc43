"""Rounds per second of the in-process engine beside pfl-research, FedJAX and a floor."""
