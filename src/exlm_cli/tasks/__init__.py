"""Downstream tasks: their data, splits, labels, metrics and predictions."""
