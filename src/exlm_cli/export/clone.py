"""The clone of a mask for which an exported LM head stands: the one that emits the most tokens.

With `model.expand: output` the LM head reads the state of a mask plus the vector of a clone, and never met the bare
state. A masked LM of transformers has one state a mask, so the export adds the vector of one clone to all states.

Axes: B sequences, M masks, k states of a mask, D width.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.data.batch import Batch, expand
from exlm_cli.data.bundled.grammar import sample_sentences
from exlm_cli.data.bundled.molecules import generate_molecules
from exlm_cli.data.corpus.sequences import cut
from exlm_cli.data.masking import Masker, Sequences
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.train.evaluation import evaluate_batch
from exlm_cli.train.objective import Objective

NUM_ROWS = 256
"""Bundled sentences or molecules whose masked tokens are counted."""


@dataclass(frozen=True)
class Clone:
    """A clone, its share of the masked tokens of the bundled rows, and its vector.

    Attributes:
        number: Counted from 1.
        share: Expected share under the posterior over alignments.
        vector: What the model adds to the state of a mask.
    """

    number: int
    share: float
    vector: Float[Tensor, " D"]


def most_used_clone(model: ExlmModel, recipe: PretrainRecipe, tokenizer: Tokenizer) -> Clone:
    """Return the clone that emits most masked tokens of bundled rows, masked as in pre-training.

    The rows are the same for all models of a kind, because an export needs no data of its run.
    """
    assert model.clone_embedding is not None, "masks are not expanded in the input"
    batch = _bundled_batch(recipe, tokenizer)
    with torch.no_grad():
        if model.transition is None:
            counts = _emitted_by_independent_states(model, batch, tokenizer.unk_id)
        else:
            objective = Objective(tokenizer.unk_id, recipe.masking.num_repeats, "reference")
            counts = torch.tensor(evaluate_batch(model, objective, batch)["clones_in_use"])
    index = int(counts.argmax())
    vector: Tensor = model.clone_embedding.weight[index]
    return Clone(index + 1, float(counts[index] / counts.sum().clamp(min=1)), vector.detach())


def _bundled_batch(recipe: PretrainRecipe, tokenizer: Tokenizer) -> Batch:
    room = recipe.data.sequence_length - 2
    if recipe.data.kind == "smiles":
        rows = [ids[:room] for ids in tokenizer.encode_batch(generate_molecules(NUM_ROWS, seed=0))]
    else:
        rows = cut(tokenizer.encode(" ".join(sample_sentences(NUM_ROWS, seed=0))), room)
    lengths = np.array([len(ids) for ids in rows])
    padded = np.full((len(rows), lengths.max()), tokenizer.pad_id, dtype=np.int64)
    for to, ids in zip(padded, rows, strict=True):
        to[: len(ids)] = ids
    masker = Masker(recipe.masking, tokenizer, seed=0, epoch=0)
    masked = masker.mask(Sequences(padded, lengths, np.arange(len(rows))))
    return expand(masked, recipe.masking.num_states_per_mask, expands_input=False, pad_id=tokenizer.pad_id)


def _emitted_by_independent_states(model: ExlmModel, batch: Batch, blank_id: int) -> Float[Tensor, " k"]:
    """Return the expected targets of each clone where one state of a mask emits and all others are blank."""
    k, nodes = model.num_states_per_mask, model.node_states(batch)
    target_N = batch.target_ids.flatten().index_select(0, batch.target_index).repeat_interleave(k)
    both_N2 = torch.stack([target_N, torch.full_like(target_N, blank_id)], dim=1)
    target_Mk, blank_Mk = model.token_log_probs(nodes, both_N2).unflatten(0, (-1, k)).unbind(-1)
    counts: Tensor = (target_Mk - blank_Mk).softmax(-1).sum(0)
    return counts
