"""What tables and GLUE have in common: labels, splits, encoding, scores."""
