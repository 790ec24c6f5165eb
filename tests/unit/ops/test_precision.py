"""Which precision a device takes, and the dtype of products in it."""

import pytest
import torch

from exlm_cli.ops.precision import autocast, choose_precision, matmul_dtype, precision_on

T4, A100, B200 = (7, 5), (8, 0), (10, 0)


def test_auto_is_what_the_tensor_cores_of_a_card_have_and_another_wish_is_granted():
    expected = {None: "fp32", (6, 1): "fp16", T4: "fp16", A100: "bf16", B200: "bf16"}
    assert {capability: choose_precision("auto", capability) for capability in expected} == expected
    for wanted, capability in (("fp32", B200), ("bf16", T4), ("fp16", None)):
        assert choose_precision(wanted, capability) == wanted


def test_the_capability_is_that_of_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: {0: T4, 1: A100}[device.index])
    assert [precision_on(torch.device("cuda", i), "auto") for i in (0, 1)] == ["fp16", "bf16"]
    assert precision_on(torch.device("cpu"), "auto") == "fp32"


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_products_have_the_dtype_of_the_precision(precision, dtype):
    numbers = torch.ones(2, 2)
    with autocast(numbers.device, precision):
        assert (numbers @ numbers).dtype == matmul_dtype(numbers) == dtype
    assert (numbers @ numbers).dtype == torch.float32
