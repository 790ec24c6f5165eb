"""The Python in `docs/alignment_op.md` runs as it stands; its CTC block asserts by itself that it equals `ctc_loss`."""

import re
from pathlib import Path

import pytest
import torch

DOCUMENT = Path(__file__).parents[3] / "docs" / "alignment_op.md"
BLOCKS = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)


def run(block: str, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    names: dict[str, torch.Tensor] = {}
    torch.set_default_dtype(dtype)
    try:
        exec(block, names)  # the project's own document
    finally:
        torch.set_default_dtype(torch.float32)
    return names


def test_the_document_holds_two_uses_of_ten_lines() -> None:
    statements = [[line for line in block.splitlines() if line and "import" not in line] for block in BLOCKS]
    assert [len(lines) <= 11 for lines in statements] == [True, True]


@pytest.mark.parametrize("seed", range(3))
def test_a_decoder_learns_and_decodes(seed: int) -> None:
    names = run(BLOCKS[0], seed)
    assert names["hidden"].grad.isfinite().all()
    assert names["hidden"].grad.abs().sum() > 0
    nodes = names["nodes"]
    assert (nodes[0] > 0).all()
    assert (nodes[0].diff() > 0).all()
    assert nodes[1, 4:].tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-4), (torch.float64, 1e-11)], ids=["float32", "float64"]
)
def test_ctc_is_a_special_case(dtype: torch.dtype, bound: float) -> None:
    names = run(BLOCKS[1], 0, dtype)
    nll, log_probs = names["nll"], names["log_probs"]
    (gradient,) = torch.autograd.grad(nll.sum(), log_probs, retain_graph=True)
    (expected,) = torch.autograd.grad(names["expected"], log_probs)
    # ctc_loss gives the gradient through the softmax before it, so compare what both give for its logits
    through_softmax = gradient - log_probs.detach().exp() * gradient.sum(-1, keepdim=True)
    torch.testing.assert_close(nll[0], names["expected"], rtol=bound, atol=0)
    torch.testing.assert_close(through_softmax, expected, rtol=bound, atol=bound)


def test_the_package_gives_the_op_by_the_same_names() -> None:
    import exlm_cli
    from exlm_cli.ops import alignment

    assert all(getattr(exlm_cli, name) is getattr(alignment, name) for name in exlm_cli.__all__)
    with pytest.raises(AttributeError, match=r"^module 'exlm_cli' has no attribute 'nothing'$"):
        exlm_cli.nothing  # noqa: B018  # asking for it is the test
