"""GPUs by the names of their drivers: as `nvidia-smi -L` and `torch.cuda.get_device_name` print them."""

import pytest

from exlm_cli.cost.gpus import GPUS, find_gpu


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("Tesla T4", "t4"),
        # of another peak
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H200 NVL", None),
    ],
)
def test_a_card_is_found_by_the_name_of_its_driver_and_none_is_taken_for_another(name, key):
    assert find_gpu(name) == GPUS.get(key)
