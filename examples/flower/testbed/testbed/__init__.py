"""The testbed as a Flower app."""
