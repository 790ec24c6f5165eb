"""Data: rows of files, tokenizers, token shards, masks and batches. Here are the types of their arrays."""

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
