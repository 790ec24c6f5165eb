"""Cost of training: `counts` in closed form, hours and memory as `estimate`, what a run takes by `meter`; `gpus`."""
