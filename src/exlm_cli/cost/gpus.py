"""GPUs whose peak is known: for the cost of a run before it begins, and for the utilisation that it reaches."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A GPU, from the vendor's data sheet.

    Attributes:
        product: Its name for people.
        peak_flops: FLOP/s of dense products of 16-bit numbers with float32 sums.
        memory_bytes: Its memory.
        device_names: What the driver calls it, without `NVIDIA`; an instance of MIG has another name.
    """

    product: str
    peak_flops: float
    memory_bytes: float
    device_names: tuple[str, ...]


GPUS = {
    "a10": Gpu("A10, 24 GB", 125e12, 24e9, ("A10",)),
    "a100": Gpu("A100 SXM, 80 GB", 312e12, 80e9, ("A100-SXM4-80GB", "A100 80GB PCIe")),
    "a100-40gb": Gpu("A100 SXM, 40 GB", 312e12, 40e9, ("A100-SXM4-40GB", "A100-PCIE-40GB")),
    "b200": Gpu("B200 SXM, 180 GB", 2250e12, 180e9, ("B200",)),
    "h100": Gpu("H100 SXM, 80 GB", 989e12, 80e9, ("H100 80GB HBM3",)),
    "h100-nvl": Gpu("H100 NVL, 94 GB", 835e12, 94e9, ("H100 NVL",)),
    "h100-pcie": Gpu("H100 PCIe, 80 GB", 756e12, 80e9, ("H100 PCIe",)),
    "h200": Gpu("H200 SXM, 141 GB", 989e12, 141e9, ("H200",)),
    "l4": Gpu("L4, 24 GB", 121e12, 24e9, ("L4",)),
    "l40s": Gpu("L40S, 48 GB", 362e12, 48e9, ("L40S",)),
    "rtx3090": Gpu("GeForce RTX 3090, 24 GB", 71e12, 24e9, ("GeForce RTX 3090",)),
    "rtx4090": Gpu("GeForce RTX 4090, 24 GB", 165e12, 24e9, ("GeForce RTX 4090",)),
    "rtx5090": Gpu("GeForce RTX 5090, 32 GB", 209.5e12, 32e9, ("GeForce RTX 5090",)),
    "t4": Gpu("T4, 16 GB", 65e12, 16e9, ("Tesla T4", "T4")),
    "v100": Gpu("V100 SXM2, 32 GB", 125e12, 32e9, ("Tesla V100-SXM2-32GB", "Tesla V100-SXM2-16GB")),
}
"""By the name that `exlm recipes --gpu` takes."""


def find_gpu(device_name: str) -> Gpu | None:
    """Return the GPU that the driver calls so; None where it is not in the table."""
    name = device_name.removeprefix("NVIDIA ")
    return next((gpu for gpu in GPUS.values() if name in gpu.device_names), None)
