"""Functions of tensors: emissions, rotary positions, the prior over paths; the alignment loss has a folder."""
