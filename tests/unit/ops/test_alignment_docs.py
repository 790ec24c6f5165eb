"""The Python in `docs/alignment_op.md` runs as it stands; its CTC block asserts by itself that it equals `ctc_loss`."""

import re
from pathlib import Path

import pytest
import torch

DOCUMENT = Path(__file__).parents[3] / "docs" / "alignment_op.md"
BLOCKS = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)


def run(block: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    names: dict[str, torch.Tensor] = {}
    exec(block, names)  # the project's own document
    return names


def test_a_decoder_learns_and_decodes() -> None:
    names = run(BLOCKS[0])
    assert names["hidden"].grad.isfinite().all()
    assert names["hidden"].grad.abs().sum() > 0
    nodes = names["nodes"]
    assert (nodes[0] > 0).all()
    assert (nodes[0].diff() > 0).all()
    assert nodes[1, 4:].tolist() == [-1, -1]


def test_ctc_is_a_special_case() -> None:
    names = run(BLOCKS[1])
    torch.testing.assert_close(names["nll"][0], names["expected"], rtol=1e-4, atol=0)


def test_the_package_gives_the_op_by_the_same_names() -> None:
    import exlm_cli
    from exlm_cli.ops import alignment

    shared = set(alignment.__all__) & set(exlm_cli.__all__)
    assert shared == {"alignment_edge_posterior", "alignment_posterior", "best_alignment", "states_alignment_nll"}
    assert all(getattr(exlm_cli, name) is getattr(alignment, name) for name in shared)
    with pytest.raises(AttributeError, match=r"^module 'exlm_cli' has no attribute 'nothing'$"):
        exlm_cli.nothing  # noqa: B018  # asking for it is the test
