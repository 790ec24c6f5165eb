"""Random forests, gradient boosting and TF-IDF on the same rows."""
