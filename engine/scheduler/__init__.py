"""Scheduling: which tokens of which requests the next step computes. Plain Python, no torch."""
