"""$name: a Flower app whose model serves the whole population."""
