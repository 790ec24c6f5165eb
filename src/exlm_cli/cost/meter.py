"""What a training takes, measured: parameters of a network, tokens a second, share of a GPU's peak, peak memory."""

import resource
import sys
from dataclasses import dataclass

import torch
from torch import nn

from exlm_cli.cost.gpus import Gpu, find_gpu


def num_parameters(network: nn.Module) -> int:
    """Return the number of parameters of a network, tied ones counted once."""
    return sum(parameter.numel() for parameter in network.parameters())


def tokens_per_second(num_tokens: int, busy_s: float) -> float:
    """Return the speed of steps that took so long."""
    return num_tokens / max(1e-9, busy_s)


@dataclass
class _Work:
    """Work of all ranks, and the seconds that it took."""

    num_tokens: int = 0
    flops: float = 0.0
    busy_s: float = 0.0


class Meter:
    """Adds up the work of steps, since the last row of the log and since this process began.

    Args:
        device: Where the steps run.
        precision: Of their products: `fp32`, `bf16` or `fp16`.
        num_ranks: Ranks whose work is counted together; each has such a device.

    Attributes:
        gpu: What utilisation is a share of; None on a CPU, on an unknown GPU, and in fp32, whose peak is another.
    """

    gpu: Gpu | None

    def __init__(self, device: torch.device, precision: str, num_ranks: int) -> None:
        self._device, self._num_ranks = device, num_ranks
        is_known = device.type == "cuda" and precision != "fp32"
        self.gpu = find_gpu(torch.cuda.get_device_name(device)) if is_known else None
        self._of_row, self._of_process = _Work(), _Work()

    def add_time(self, busy_s: float) -> None:
        """Add time in steps, waiting for the device included."""
        self._of_row.busy_s += busy_s
        self._of_process.busy_s += busy_s

    def add_work(self, num_tokens: int, flops: float) -> None:
        """Add the work of a step, of all ranks; 0 FLOPs are not counted ones."""
        for work in (self._of_row, self._of_process):
            work.num_tokens += num_tokens
            work.flops += flops

    def begin_row(self) -> tuple[float, float | None]:
        """Return tokens a second and utilisation since the last call."""
        work, self._of_row = self._of_row, _Work()
        return tokens_per_second(work.num_tokens, work.busy_s), self._utilisation(work)

    @property
    def utilisation(self) -> float | None:
        """Share of the peak that the steps of this process reached, without validations; None where it is not known."""
        return self._utilisation(self._of_process)

    @property
    def peak_memory_bytes(self) -> int:
        """Most memory of this process so far: what its tensors took on CUDA, on a CPU all that was resident."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        # in kilobytes, but on macOS in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def _utilisation(self, work: _Work) -> float | None:
        if self.gpu is None or not work.flops or not work.busy_s:
            return None
        return work.flops / work.busy_s / (self._num_ranks * self.gpu.peak_flops)
