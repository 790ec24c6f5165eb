"""Log-space arithmetic whose gradients survive `-inf`."""

import math

from jaxtyping import Float
from torch import Tensor


def safe_logsumexp(log_terms: Float[Tensor, "..."], dim: int) -> Float[Tensor, "..."]:
    """`torch.logsumexp`, with gradient zero instead of NaN where a whole slice is `-inf`."""
    peak = log_terms.detach().amax(dim, keepdim=True)
    is_dead = peak == -math.inf
    total = (log_terms - peak.masked_fill(is_dead, 0.0)).exp().sum(dim, keepdim=True)
    return (total.masked_fill(is_dead, 1.0).log() + peak).squeeze(dim)
