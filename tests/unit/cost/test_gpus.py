"""GPUs by the names of their drivers: as `nvidia-smi -L` and `torch.cuda.get_device_name` print them."""

import pytest

from exlm_cli.cost.gpus import GPUS, find_gpu

NAMES = {
    "NVIDIA A100-SXM4-80GB": "a100",
    "A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100 80GB PCIe": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H200": "h200",
    "NVIDIA L40S": "l40s",
    "Tesla T4": "t4",
    "Tesla V100-SXM2-16GB": "v100",
}


@pytest.mark.parametrize(("name", "key"), NAMES.items())
def test_a_card_is_found_by_the_name_of_its_driver(name, key):
    assert find_gpu(name) == GPUS[key]


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA H200 NVL",
    ],
)
def test_a_card_of_another_peak_is_not_taken_for_one_that_is_known(name):
    assert find_gpu(name) is None
