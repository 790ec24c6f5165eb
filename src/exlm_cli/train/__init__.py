"""Training: `pretrain` is a run, `pretrain_task` its batches and loss, `loop` its steps; the rest serves these."""
