"""Scores, figures and page of a fine-tuning run."""
