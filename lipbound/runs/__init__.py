"""Runs: planned, carried out, stored, verified."""
