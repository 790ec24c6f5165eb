"""Draws against exact probabilities, and passes against a chain of readings by hand."""

from collections import Counter

import numpy as np
import pytest
from scipy.stats import chisquare

from exlm_cli.dag.build import build_dag
from exlm_cli.dag.graph import Dag, FloatArray, token_marginals
from exlm_cli.data import IntArray
from exlm_cli.fill.engine import FillSettings, fill_texts
from exlm_cli.fill.molecules import read_molecule
from exlm_cli.fill.sample import draw_tokens, log_probs_of
from exlm_cli.progress import SilentProgress
from tests.tiny import word_level
from tests.unit.dag.dags import enumerate_fillings, random_dag
from tests.unit.fill.models import drawn

LETTERS = word_level(["C", "N", "O"])
NUM_DRAWS = 20_000


def _assert_as_often(dag: Dag, masks: list[int], tokens_NG: IntArray, probability_N: FloatArray) -> None:
    """These tokens are drawn as often as they are probable, and no others."""
    counts = Counter(map(tuple, draw_tokens(dag, masks, NUM_DRAWS, 1.0, np.random.default_rng(0)).tolist()))
    observed_N = np.array([counts[tuple(tokens)] for tokens in tokens_NG.tolist()])
    assert observed_N.sum() == NUM_DRAWS
    assert chisquare(observed_N, NUM_DRAWS * probability_N / probability_N.sum()).pvalue > 1e-4


@pytest.mark.parametrize("masks", [[0, 1, 2], [0, 2], [1]])
def test_draws_come_as_often_as_they_are_probable(masks):
    dag = random_dag(3, 2, 3, seed=4, sharpness=0.5)
    truth: Counter[tuple[int, ...]] = Counter()
    for tokens_by_mask, probability in enumerate_fillings(dag, "exact").items():
        truth[tuple(tokens_by_mask[mask][0] for mask in masks)] += probability
    tokens_NG, probability_N = np.array([*truth]), np.array([*truth.values()]) / truth.total()
    assert (NUM_DRAWS * probability_N).min() >= 5  # where the test of chi squared is good
    _assert_as_often(dag, masks, tokens_NG, probability_N)
    assert np.exp(log_probs_of(dag, masks, tokens_NG)) == pytest.approx(probability_N)


def test_draws_of_a_chain_come_as_often_as_its_score_says():
    dag = build_dag(drawn(LETTERS, "chain"), "C[MASK]N[MASK]O")
    letters = [LETTERS.encode(letter)[0] for letter in "CNO"]
    pairs = np.array([[a, b] for a in letters for b in letters])
    probability_N = np.exp(log_probs_of(dag, [0, 1], pairs))
    assert probability_N.sum() == pytest.approx(1)
    _assert_as_often(dag, [0, 1], pairs, probability_N)


def test_a_low_temperature_draws_the_likeliest_token_of_a_node():
    dag = random_dag(1, 1, 5, seed=0)
    drawn_NG = draw_tokens(dag, [0], 50, 0.01, np.random.default_rng(0))
    assert set(drawn_NG[:, 0].tolist()) == {int(dag.node_log_probs[1].argmax())}
    even = draw_tokens(dag, [0], NUM_DRAWS, 1e6, np.random.default_rng(0))
    assert chisquare(np.bincount(even[:, 0])).pvalue > 1e-4


def test_draws_do_not_repeat_unless_they_may_and_depend_on_the_seed_and_row_alone():
    model, texts = drawn(LETTERS), ["C[MASK][MASK]", "[MASK]O", "C[MASK][MASK]"]
    settings = FillSettings(samples=8, seed=3)
    first, few, other = fill_texts(model, texts, settings, SilentProgress())
    assert len({line.filled for line in first.lines}) == len(first.lines) == 8
    assert [line.filled for line in first.lines] != [line.filled for line in other.lines]
    assert few.notes == () or few.notes[-1] == "fewer than 8 different fillings were drawn"
    (again,) = fill_texts(model, texts[:1], settings, SilentProgress())
    assert [line.filled for line in again.lines] == [line.filled for line in first.lines]
    (many,) = fill_texts(model, ["[MASK]O"], FillSettings(samples=40, has_repeats=True), SilentProgress())
    assert len({line.filled for line in many.lines}) < len(many.lines) == 40
    best = {
        line.filled: line.log_prob for line in next(fill_texts(model, texts, FillSettings(99), SilentProgress())).lines
    }
    assert all(line.log_prob == pytest.approx(best[line.filled], abs=1e-4) for line in first.lines)


def test_as_many_passes_as_masks_fill_the_surest_mask_and_read_again():
    model, text = drawn(LETTERS), "C[MASK]N[MASK]O"
    settings = FillSettings(top=99, passes=2, keeps_invalid=True)
    (row,) = fill_texts(model, [text], settings, SilentProgress())
    marginal_TV = token_marginals(build_dag(model, text))
    surest = int(marginal_TV.max(axis=1).argmax())
    truth: Counter[str] = Counter()
    alone: Counter[str] = Counter()
    for first in "CNO":
        letters = ["[MASK]", "[MASK]"]
        letters[surest] = first
        again_V = token_marginals(build_dag(model, "C{}N{}O".format(*letters)))[0]
        for second in "CNO":
            letters[1 - surest] = second
            tokens = [LETTERS.encode(letter)[0] for letter in letters]
            molecule, _ = read_molecule("C{}N{}O".format(*letters))
            truth[molecule] += marginal_TV[surest, tokens[surest]] * again_V[tokens[1 - surest]]
            alone[molecule] += marginal_TV[[0, 1], tokens].prod()
    assert {line.filled: np.exp(line.log_prob) for line in row.lines if line.filled in truth} == pytest.approx(
        truth, rel=1e-3
    )
    found = {line.filled: np.exp(line.log_prob_alone) for line in row.lines if line.filled in alone}
    assert found == pytest.approx(alone, rel=1e-3)
    assert not any(line.is_proven for line in row.lines)


def test_several_passes_over_a_chain_give_its_own_probability_of_all_tokens_together():
    """Also where so many are asked for that a mask filled with [MASK] is among them."""
    model, text = drawn(LETTERS, "chain"), "C[MASK]N[MASK]O"
    once, twice = (
        {line.filling: line.log_prob for line in row.lines if "[" not in line.filling}
        for passes in (1, 2)
        for row in fill_texts(model, [text], FillSettings(top=99, passes=passes), SilentProgress())
    )
    assert len(once) == 9
    assert twice == pytest.approx(once, abs=1e-4)
