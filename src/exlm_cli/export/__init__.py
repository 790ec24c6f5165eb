"""Models for others: folders that transformers loads, ONNX, the Hub; and encoders that come in from there."""
