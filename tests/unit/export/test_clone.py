"""The clone for which an exported LM head stands, on models whose masks are built to use a certain one."""

import pytest
import torch

from exlm_cli.export.source import pretrained_source
from exlm_cli.train.pretrained import load_pretrained
from tests.tiny import OUTPUT
from tests.unit.finetune.finetuned_runs import smiles_pretrained
from tests.unit.finetune.synthetic import make_pretrained


@pytest.mark.parametrize("alignment", ["dag", "sparse_dag", "independent"])
@pytest.mark.parametrize("number", [1, 3])
def test_the_clone_is_the_one_that_emits_the_tokens(tmp_path, alignment, number):
    """All others have [UNK], which is no target, as their only word: as blanks where the states are independent."""
    run = make_pretrained(tmp_path / "run", model={**OUTPUT, "alignment": alignment})
    pretrained = load_pretrained(run, device="cpu")
    model, tokenizer = pretrained.model, pretrained.tokenizer
    width = pretrained.recipe.model.width
    side = torch.tensor([1.0, -1.0]).repeat_interleave(width // 2)
    assert model.clone_embedding is not None
    with torch.no_grad():
        model.lm_head.dense.weight.copy_(torch.eye(width))
        model.clone_embedding.weight.copy_(1e3 * side)
        model.clone_embedding.weight[number - 1] *= -1
        model.decoder_weight[tokenizer.unk_id] = 10 * side
    clone = pretrained_source(pretrained).clone
    assert clone is not None
    assert clone.number == number
    assert clone.share == pytest.approx(1)
    assert torch.equal(clone.vector, -1e3 * side)


def test_other_models_have_none(tmp_path):
    runs = [smiles_pretrained(tmp_path), make_pretrained(tmp_path / "mlm", objective="mlm")]
    assert [pretrained_source(load_pretrained(run, device="cpu")).clone for run in runs] == [None, None]


def test_molecules_are_counted_too(tmp_path):
    """Untrained clones are used about equally."""
    trained = load_pretrained(smiles_pretrained(tmp_path), device="cpu")
    data = {"kind": "smiles", "sequence_length": 24}
    run = make_pretrained(tmp_path / "output", trained.tokenizer, data=data, model=OUTPUT)
    clone = pretrained_source(load_pretrained(run, device="cpu")).clone
    assert clone is not None
    assert 1 / 3 <= clone.share < 0.5
