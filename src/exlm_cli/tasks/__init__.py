"""Downstream tasks: their data, their scores, and fine-tuning on them."""
