"""Random forests and TF-IDF on the same rows."""
