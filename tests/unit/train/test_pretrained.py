"""What a checkpoint decides of the model that begins with it."""

from pathlib import Path

import pytest
import torch

from exlm_cli.model.exlm import ExlmModel
from exlm_cli.progress import SilentProgress
from exlm_cli.train.pretrained import Pretrained, adopt_architecture, begin_with
from tests.tiny import CHAIN, SPECIAL, tiny_recipe

DAG = {"transition": {"rope": "nodes", "start": "next_mask", "heads": 2}}
INDEPENDENT = {"alignment": "independent"}
MORE_CLASSES = CHAIN | {"chain": {"num_classes": 7}}


@pytest.mark.parametrize(
    ("start", "own", "alignment", "new"),
    [
        (DAG, {}, "dag", ""),
        (DAG, {"alignment": "sparse_dag"}, "sparse_dag", ""),
        (DAG, CHAIN, "dag", ""),
        (INDEPENDENT, CHAIN, "independent", ""),
        (INDEPENDENT, DAG, "dag", "the transition head"),
        (MORE_CLASSES, CHAIN, "chain", ""),
        (MORE_CLASSES, DAG, "chain", ""),
        ({"rope": "1d"}, INDEPENDENT, "independent", ""),
    ],
)
def test_an_exlm_goes_on_with_the_head_of_its_checkpoint_if_its_encoder_reads_masks_so(start, own, alignment, new):
    """An encoder that has read k copies of a mask never becomes a chain's, nor the reverse."""
    theirs = tiny_recipe(model=start)
    model = ExlmModel(theirs, SPECIAL.vocab_size)
    checkpoint = Pretrained(model, SPECIAL, theirs, Path("runs/x/step-1"), step=1, num_tokens=0, sha256="")
    adopted = adopt_architecture(tiny_recipe(model=own), checkpoint, SilentProgress())
    assert adopted.model.alignment == alignment
    begun = ExlmModel(adopted, SPECIAL.vocab_size)
    assert begin_with(begun, checkpoint) == new
    if not new:
        assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in begun.state_dict().items())
