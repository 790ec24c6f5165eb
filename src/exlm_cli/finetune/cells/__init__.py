"""One seed on one split: model, batches, training, workers."""
