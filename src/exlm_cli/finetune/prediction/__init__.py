"""Predictions and vectors of new rows, and their explanations."""
