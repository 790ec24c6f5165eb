"""Fillings of listed words alone, against a filtered enumeration of all fillings on small DAGs and small models."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from exlm_cli.dag.fillings import n_best_fillings
from exlm_cli.dag.graph import Dag
from exlm_cli.fill.engine import FillSettings, fill_texts
from exlm_cli.fill.score import score_text
from exlm_cli.fill.targets import Targets
from exlm_cli.fill.words import MaskWords
from exlm_cli.progress import SilentProgress
from tests.tiny import word_level
from tests.unit.dag.dags import enumerate_fillings, random_dag
from tests.unit.fill.models import DESIGNS, drawn, sentence_tokenizer

LETTERS = word_level(["C", "N", "O", "S", "F"])


@pytest.fixture(scope="module")
def small() -> tuple[Dag, dict[tuple[str, ...], float]]:
    """Return a DAG over the letters of the tokenizer, and the probabilities of all its fillings.

    Special tokens are as likely as they are drawn.
    """
    ids = np.array([LETTERS.cls_id, *[LETTERS.mask_id] * 3, LETTERS.sep_id])
    dag = replace(random_dag(3, 2, LETTERS.vocab_size, 0), tokenizer=LETTERS, input_ids=ids, text="[MASK]" * 3)
    every = enumerate_fillings(dag, "exact").items()
    return dag, {tuple(LETTERS.token_text(token) for (token,) in tokens): value for tokens, value in every}


@pytest.mark.parametrize("segments", [(3,), (2, 1), (1, 1, 1), (1, 2)])
@pytest.mark.parametrize("is_single", [True, False])
def test_fillings_of_targets_are_those_of_a_filtered_enumeration(small, segments, is_single):
    words = ["C", "NO", "O", "CNO", "NC"] if not is_single else ["C", "N", "NO", "SF", "CNO", "OOO"]
    dag, every = small

    def fits(text: str) -> bool:
        if text in words:
            return True
        return not is_single and any(text.startswith(w) and fits(text[len(w) :]) for w in words if text != w)

    bounds = [0, *itertools.accumulate(segments)]
    truth = {
        "".join(letters): probability
        for letters, probability in every.items()
        if all(fits("".join(letters[a:b])) for a, b in itertools.pairwise(bounds))
    }
    allowed = Targets(MaskWords(LETTERS), words, [False] * 3, segments, begins_text=False, is_single=is_single)
    for n in (2, 100):
        found = n_best_fillings(dag, n, allowed=allowed)
        assert found.is_proven
        best = dict(sorted(truth.items(), key=lambda item: -item[1])[:n])
        assert {f.text: np.exp(f.log_prob) for f in found.fillings} == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("design", DESIGNS)
def test_a_model_fills_masks_with_targets_at_their_probability(design):
    """Also where one begins the text, before which a blank does not count."""
    tokenizer = sentence_tokenizer()
    model, text, words = drawn(tokenizer, design), "[MASK] is [MASK].", MaskWords(tokenizer)
    (row,) = fill_texts(model, [text], FillSettings(top=50), SilentProgress(), [["very", "glad", "sorry", "zz"]])
    known = [word for word in ("very", "glad", "sorry") if len(tokenizer.encode(f" {word}")) == 1]
    assert {line.filling for line in row.lines} == {"|".join(pair) for pair in itertools.product(known, repeat=2)}
    scores = [score_text(model, text, line.filling, words).log_prob for line in row.lines]
    assert [line.log_prob for line in row.lines] == pytest.approx(scores, abs=1e-4) == sorted(scores, reverse=True)


def test_one_to_n_tokens_at_a_mask_are_inputs_of_their_own():
    model = drawn(LETTERS)
    texts = ["C[MASK]O[MASK]", "C[MASK][MASK]O[MASK]", "C[MASK]O[MASK][MASK]", "C[MASK][MASK]O[MASK][MASK]"]
    settings = FillSettings(top=8)
    apart = [line for row in fill_texts(model, texts, settings, SilentProgress()) for line in row.lines]
    for normalised in (False, True):
        wide = replace(settings, max_tokens=2, is_length_normalised=normalised)
        (row,) = fill_texts(model, texts[:1], wide, SilentProgress())
        scores = sorted((line.log_prob / (line.num_tokens if normalised else 1) for line in apart), reverse=True)
        mine = [line.log_prob / (line.num_tokens if normalised else 1) for line in row.lines]
        assert mine == sorted(mine, reverse=True)
        assert mine[0] == pytest.approx(scores[0], abs=1e-4)
    (row,) = fill_texts(
        model, texts[:1], replace(wide, top=50, keeps_invalid=True), SilentProgress(), [["N", "SF", "CNO"]]
    )
    assert {tuple(line.filling.split("|")) for line in row.lines} == set(itertools.product(["N", "SF"], repeat=2))


def test_targets_that_fit_nowhere_are_told():
    model = drawn(LETTERS)
    rows = list(fill_texts(model, ["C[MASK]", "C[MASK]"], FillSettings(), SilentProgress(), [["NO"], ["Xx"]]))
    assert "no target is as long as its masks" in rows[0].problem
    assert "the vocabulary of the model has no 'Xx'" in rows[1].problem
    (row,) = fill_texts(model, ["[MASK]C" * 5], FillSettings(max_tokens=3), SilentProgress())
    assert "5 masks of 1 to 3 tokens make 243 inputs; at most 64" in row.problem
