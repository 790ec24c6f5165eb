"""Training: `pretrain` is a run, `pretrain_task` its batches and loss, `loop` its steps, `records` what it leaves to
read, `checkpoint` and `saver` what it continues from, `workers` several runs at once; the rest serves these.
"""
