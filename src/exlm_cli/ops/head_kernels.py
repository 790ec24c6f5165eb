"""Kernels of the LM head on CUDA: log-probabilities of a few tokens of each row of logits, and their gradient.

They are compiled into the library of the alignment kernels; `cuda_ext/include/states_alignment.h` defines the
interface. Tensors arrive checked.

Axes: R rows, V vocabulary, P padded vocabulary, T tokens to score in each row.
"""

import ctypes
from dataclasses import dataclass

from torch import Tensor

from exlm_cli.ops.alignment.library import DTYPES, DeviceKernels, pointer


class _Logits(ctypes.Structure):
    """`states_alignment_logits`."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("vocab", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
    )


@dataclass(frozen=True)
class LogitRows:
    """Rows of logits and the tokens to score in each, in the layout that the kernels read.

    Attributes:
        logits: (R, P) without their bias; P is a multiple of 8 and at least V, and entries from V on have no effect.
        bias: (V,) float32.
        tokens: (R, T) int64, below V.
    """

    logits: Tensor
    bias: Tensor
    tokens: Tensor

    def as_struct(self) -> _Logits:
        """Return the C struct of the tensors; valid while they live."""
        rows, row_stride = self.logits.shape
        return _Logits(
            self.logits.data_ptr(),
            self.bias.data_ptr(),
            rows,
            len(self.bias),
            row_stride,
            self.tokens.shape[1],
            DTYPES[self.logits.dtype],
        )


def token_log_probs(kernels: DeviceKernels, rows: LogitRows, log_sums: Tensor, log_probs: Tensor) -> None:
    """Fill `log_sums` (R,), the log-sum-exp of each row, and `log_probs` (R, T) of its tokens; both float32."""
    kernels.call("token_log_probs", rows, *map(pointer, (rows.tokens, log_sums, log_probs)))


def logit_gradient(
    kernels: DeviceKernels, rows: LogitRows, log_sums: Tensor, log_probs: Tensor, grad: Tensor, gradient: Tensor
) -> None:
    """Fill `gradient`, which may be the logits, from the results of `token_log_probs` and their gradient `grad`."""
    kernels.call("logit_gradient", rows, *map(pointer, (rows.tokens, log_sums, log_probs, grad, gradient)))
