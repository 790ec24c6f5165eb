"""Pre-trained models with weights as they are drawn, and the truth about their fillings by enumeration."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch

from exlm_cli.dag.graph import Dag
from exlm_cli.data.tokenizer import Tokenizer, train_bpe
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.progress import SilentProgress
from exlm_cli.train.pretrained import Pretrained
from tests.tiny import CHAIN, tiny_recipe
from tests.unit.dag.dags import enumerate_paths

DESIGNS = {"input": {}, "chain": CHAIN, "mlm": {"objective": "mlm"}}
"""The designs of a DAG, and none."""


@cache
def sentence_tokenizer() -> Tokenizer:
    """Return a tokenizer of sentences about how one feels."""
    kinds = ("This is amazing, and I'm very glad to see this.", "This is terrible, and I'm very sorry to see this.")
    return train_bpe([kind for kind in kinds for _ in range(3)], 320, 2, SilentProgress())


def pretrained(tokenizer: Tokenizer, **sections: object) -> Pretrained:
    """Return a model whose weights are as they are drawn, of a recipe with these sections."""
    recipe = tiny_recipe(**sections)
    torch.manual_seed(0)
    network = ExlmModel(recipe, tokenizer.vocab_size).eval()
    return Pretrained(network, tokenizer, recipe, Path("runs/x/step-1"), step=1, num_tokens=0, sha256="")


def drawn(tokenizer: Tokenizer, design: str = "input", **data: object) -> Pretrained:
    """Return a model of a design, with weights so large that its distributions are far from even.

    As one that was trained, it never fills a mask with a special token.
    """
    model = {"init_std": 0.3} | ({} if design == "mlm" else DESIGNS[design])
    objective = "mlm" if design == "mlm" else "exlm"
    data = {"kind": tokenizer.kind, "sequence_length": 32, **data}
    found = pretrained(tokenizer, data=data, model=model, objective=objective)
    network = found.model
    if network.chain_head is not None:  # which begins without classes, and without reading the token before
        for part in (network.chain_head.classes, network.chain_head.change):
            torch.nn.init.normal_(part.weight)
    with torch.no_grad():
        network.lm_head.bias[[*tokenizer.special_ids]] = -50.0
    return found


def probability(dag: Dag, sequences: Sequence[Sequence[int]]) -> float:
    """Return the probability of token sequences together, one token a mask, given as many, over enumerated paths."""
    paths = dict(enumerate_paths(dag, [dag.num_masks]))
    emit = np.exp(dag.node_log_probs)
    found = sum(
        p * float(np.prod([emit[u, y] for u, y in zip(nodes, tokens, strict=True)]))
        for tokens in sequences
        for nodes, p in paths.items()
    )
    return found / sum(paths.values())
