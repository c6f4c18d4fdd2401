"""Measurements side by side with peers: ``python -m benchmarks`` writes results.md and a picture."""
