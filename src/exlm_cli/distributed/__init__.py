"""Ranks: processes that train one model together, through torch.distributed; `launch` needs no torch."""
