"""Benchmarks: one question a file, every figure beside its peers in the same run."""
