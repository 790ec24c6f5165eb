"""Pre-training: loop, objective, optimiser, checkpoints, validation."""
