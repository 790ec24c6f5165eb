"""Sweeps: many runs that differ in a few keys, trained and scored."""
