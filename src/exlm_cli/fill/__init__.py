"""Masks of many rows, filled and scored with a pre-trained model: `exlm fill`."""
