"""Ranks: processes that train one model together, through torch.distributed."""
