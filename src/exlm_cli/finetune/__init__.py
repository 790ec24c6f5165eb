"""Fine-tuning of any task: `run` checks and reads, `training` trains and scores."""
