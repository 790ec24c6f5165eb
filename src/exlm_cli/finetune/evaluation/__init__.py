"""Scores, intervals, calibration, verdict."""
