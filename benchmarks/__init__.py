"""Benchmarks: run by hand, results saved beside them."""
