"""FLOPs in closed form against torch's own counter, the DAG's edges against an enumeration.

Parameters are counted in the real network by `tests/unit/model/test_exlm.py`.
"""

import itertools
import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from exlm_cli.config.load import load_recipe
from exlm_cli.cost.counts import (
    count_path_edges,
    count_sequence_flops,
    recipe_step_flops,
    tokens_per_step,
)
from exlm_cli.data.masking import Masker
from exlm_cli.model import exlm
from exlm_cli.model.chain import ChainHead
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.ops import emissions
from exlm_cli.train.objective import Objective
from tests.tiny import CHAIN, SPECIAL, sequences, tiny_batch, tiny_recipe

NUM_SEQUENCES, NUM_TOKENS = 3, 20


def _flops_inside(*inputs, function, out_val):
    """What torch counts inside an operator, run again on tensors without data."""
    del out_val
    with FlopCounterMode(display=False) as counter:
        function(*(i.to("meta") if isinstance(i, Tensor) else i for i in inputs))
    return int(counter.get_total_flops())


# torch counts no products inside operators that are not its own
INSIDE = {
    getattr(torch.ops.exlm, name): partial(_flops_inside, function=operator._init_fn)
    for name, operator in (
        ("token_log_probs", emissions._forward_op),
        ("token_log_probs_backward", emissions._backward_op),
    )
}
for _formula in INSIDE.values():
    _formula._get_raw = True  # takes tensors, not their shapes


def measured_flops(recipe):
    """Forward and backward over sequences of equal length and equally many masks, counted by torch.

    The plain attention kernel and the plain alignment are used: flash attention computes scores twice, and the fast
    alignments turn sums over paths into matrix products.
    """
    model = ExlmModel(recipe, SPECIAL.vocab_size)
    batch = tiny_batch(recipe, (NUM_TOKENS,) * NUM_SEQUENCES)
    objective = Objective(4, recipe.masking.num_repeats, "reference")
    with FlopCounterMode(display=False, custom_mapping=INSIDE) as counter, sdpa_kernel(SDPBackend.MATH):
        objective.sequence_nll(model, batch).sum().backward()
    return float(counter.get_total_flops())


def expected_flops(recipe):
    """FLOPs by the closed form for the same sequences."""
    masking = recipe.masking
    num_targets = masking.mask_ratio * NUM_TOKENS * masking.num_repeats
    num_further = (masking.num_states_per_mask - 1) * num_targets if recipe.expands_input else 0
    num_positions = 2 + NUM_TOKENS * masking.num_repeats + num_further
    own = recipe.changed({"tokenizer.vocab_size": SPECIAL.vocab_size})
    return count_sequence_flops(own, num_positions, num_targets).scaled(NUM_SEQUENCES)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"objective": "mlm"},
        {"objective": "mlm", "masking": {"mask_ratio": 0.2, "num_repeats": 2}},
        {"model": {"alignment": "sparse_dag"}},
        {"model": {"alignment": "independent"}},
        {"model": {"transition": {"heads": 2, "position_features": True, "max_nodes": 64}}},
    ],
)
def test_the_closed_form_is_what_torch_counts_in_a_real_step(sections):
    """Every product of matrices, exactly; the alignment is the one part that torch's counter does not see."""
    recipe = tiny_recipe(**sections)
    expected = expected_flops(recipe)
    assert measured_flops(recipe) == pytest.approx(expected.total - expected.alignment, rel=1e-12)


def test_logits_made_again_and_the_classes_of_the_vocabulary_are_not_in_the_floor(monkeypatch):
    """A chain makes its logits again, and others do for want of memory."""
    monkeypatch.setattr(ChainHead, "is_learning", True)
    recipe = tiny_recipe(model=CHAIN)
    num_masks, width, num_classes = NUM_SEQUENCES * 0.3 * NUM_TOKENS, recipe.model.width, recipe.model.chain.num_classes
    left_out = 2 * num_masks * width * SPECIAL.vocab_size + 3 * 2 * SPECIAL.vocab_size * width * num_classes
    expected = expected_flops(recipe)
    assert measured_flops(recipe) == pytest.approx(expected.total - expected.alignment + left_out, rel=1e-12)
    monkeypatch.setattr(exlm, "HEAD_CHUNK_ROWS", 7)
    recipe = tiny_recipe()
    again = 2 * 3 * num_masks * width * SPECIAL.vocab_size
    expected = expected_flops(recipe)
    assert measured_flops(recipe) == pytest.approx(expected.total - expected.alignment + again, rel=1e-12)


@pytest.mark.parametrize(("num_inner", "num_targets"), [(1, 1), (5, 1), (4, 4), (6, 2), (8, 4), (9, 3)])
def test_path_edges_are_those_that_an_enumeration_of_paths_meets(num_inner, num_targets):
    """Every path is an ascending choice of T inner nodes; an edge counts once for each target that it can lead to."""
    num_nodes = num_inner + 2
    edges = set()
    for choice in itertools.combinations(range(1, num_inner + 1), num_targets):
        path = (0, *choice, num_nodes - 1)
        edges |= {(target, v, u) for target, (v, u) in enumerate(itertools.pairwise(path))}
    assert count_path_edges(num_nodes, num_targets) == len(edges)


def test_the_paper_size_costs_at_least_1_6_times_its_mlm():
    """By hand, a sequence of 128 with p = 15 %, k = 4: 184.7 positions instead of 128, four times the LM-head rows.

    A block of 12 D^2 weights a position; the last of twelve has 2 D^2 of keys and values at all positions, and the
    others at the 77.6 or 20.9 nodes.
    """
    twin = ["objective=mlm", "masking.num_states_per_mask=1", "model.rope=1d"]
    exlm, mlm = (recipe_step_flops(load_recipe("ablation-exlm", changes)) for changes in ([], twin))
    weights = [11 * 12 * positions + 2 * positions + 10 * nodes for positions, nodes in ((184.7, 77.6), (128, 20.9))]
    assert exlm.encoder_linear / mlm.encoder_linear == pytest.approx(weights[0] / weights[1])
    pairs = [(11 * positions + nodes) * positions for positions, nodes in ((184.7, 77.6), (128, 20.9))]
    assert exlm.attention / mlm.attention == pytest.approx(pairs[0] / pairs[1])
    assert exlm.lm_head / mlm.lm_head == pytest.approx(4)
    assert exlm.total / mlm.total == pytest.approx(1.662, abs=1e-3)
    assert exlm.alignment / exlm.total < 1e-3


@pytest.mark.parametrize("scheme", ["fixed", "bernoulli"])
@pytest.mark.parametrize("ratio", [0.02, 0.45])
def test_the_mean_number_of_masks_is_that_of_the_masker(scheme, ratio):
    masking = {"scheme": scheme, "mask_ratio": ratio}
    recipe = tiny_recipe(masking=masking | {"num_repeats": 1})
    rows = np.tile(np.arange(5, 19), (20_000, 1))  # the 14 tokens of a full sequence
    counts = Masker(recipe.masking, SPECIAL, 0, 0).count(sequences(rows))
    assert recipe.mean_masks == pytest.approx(counts.mean(), abs=5 * counts.std() / math.sqrt(len(counts)) + 1e-12)


def test_flops_of_a_range_take_the_moments_of_the_number_of_masks():
    """Of 50 tokens with T masks: with k = 3 the head scores (3 T + 2)^2 pairs, and paths take a cubic of edges."""
    recipe = tiny_recipe(masking={"mask_ratio": [0, 0.5]}, data={"sequence_length": 52}, model={"max_length": 128})
    h = sum(Fraction(1, m) for m in range(1, 26))
    mean, square, cube = 25 / h, Fraction(26 * 25, 2) / h, Fraction(25 * 26 * 51, 6) / h
    flops = recipe_step_flops(recipe)
    pairs = 9 * square + 12 * mean + 4
    assert flops.transition == pytest.approx(float(8 * 6 * (2 * (3 * mean + 2) * 16 * 16 + pairs * 16)), rel=1e-12)
    # 2 w + (T - 1) w (w + 1) / 2 with w = 2 T + 1
    edges = 2 * cube + square + 2 * mean + 1
    assert flops.alignment == pytest.approx(float(8 * 6 * edges), rel=1e-12)
    # one block whole and one that is read at the nodes
    queries = 54 * 52 + 368 * mean + 10 * square
    assert flops.attention == pytest.approx(float(8 * 12 * queries * 16), rel=1e-12)
    assert flops.lm_head == pytest.approx(float(8 * 6 * 3 * mean * (16**2 + 16 * 300)), rel=1e-12)


def test_tokens_of_a_step_count_repetitions_and_not_clones():
    assert tokens_per_step(tiny_recipe()) == 8 * 16
    assert tokens_per_step(tiny_recipe(objective="mlm", masking={"num_repeats": 3})) == 8 * (14 * 3 + 2)
    assert tokens_per_step(tiny_recipe(train={"batch_sequences": None, "batch_tokens": 500})) == 500
