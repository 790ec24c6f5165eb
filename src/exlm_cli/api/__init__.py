"""The Python API: `run` is a trained model, `fitting` and `estimators` train one on rows that `frames` reads."""
