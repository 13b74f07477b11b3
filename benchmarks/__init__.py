"""Benchmarks, started by hand; no product code imports them."""
