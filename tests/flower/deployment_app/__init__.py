"""A Flower app for tests; its own directory is what Flower packs."""
