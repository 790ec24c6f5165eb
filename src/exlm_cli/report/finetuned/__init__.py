"""HTML page of a fine-tuning run."""
