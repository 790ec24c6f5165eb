"""Scores against the fillings that a search finds, enumerated paths and cuts into tokens, and single masks."""

import itertools
from collections import defaultdict

import numpy as np
import pytest

from exlm_cli.dag.build import build_dag
from exlm_cli.dag.graph import token_marginals
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.fill.engine import FillSettings, fill_texts
from exlm_cli.fill.score import score_text, score_texts
from exlm_cli.fill.words import MaskWords
from exlm_cli.progress import SilentProgress
from tests.tiny import word_level
from tests.unit.fill.models import DESIGNS, drawn, probability, sentence_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return sentence_tokenizer()


@pytest.mark.parametrize("design", DESIGNS)
def test_the_score_of_a_filling_is_the_probability_that_the_search_gives_it(tokenizer, design):
    model = drawn(tokenizer, design)
    texts, words = ["This is [MASK], and very [MASK].", "This [MASK] is [MASK] this"], MaskWords(tokenizer)
    for text, row in zip(texts, fill_texts(model, texts, FillSettings(top=20), SilentProgress()), strict=True):
        assert len(row.lines) == 20
        for line in row.lines:
            scored = score_text(model, text, line.filling, words)
            assert scored.log_prob == pytest.approx(line.log_prob, abs=1e-4)


def test_neighbouring_masks_count_every_cut_of_their_letters(tokenizer):
    model, text = drawn(tokenizer), "This is [MASK] [MASK]."
    words, cuts = MaskWords(tokenizer), defaultdict(list)
    tokens = [token for token in range(5, tokenizer.vocab_size) if words.surface(token).strip() in "very"]
    for pair in itertools.product(tokens, repeat=2):
        cuts["".join(map(words.surface, pair))].append(pair)
    pairs = max(cuts.values(), key=len)
    assert len(pairs) > 1
    truth = probability(build_dag(model, text), pairs)
    for pair in pairs:
        filling = words.write(text, [[token] for token in pair])
        assert np.exp(score_text(model, text, filling, words).log_prob) == pytest.approx(truth, rel=1e-4)


def test_a_word_of_several_tokens_is_scored_where_as_many_masks_stand(tokenizer):
    model, words = drawn(tokenizer), MaskWords(tokenizer)
    scored = score_text(model, "This is [MASK], and [MASK].", "zzy|very", words)
    assert scored.num_tokens == 1 + len(tokenizer.encode(" zzy"))
    apart = score_text(model, "This is [MASK][MASK][MASK][MASK], and [MASK].", "␣|z|z|y|very", words)
    assert (scored.log_prob, scored.num_tokens) == (pytest.approx(apart.log_prob), 5)


@pytest.mark.parametrize("design", DESIGNS)
def test_a_text_without_masks_has_the_sum_over_its_tokens_masked_in_turn(tokenizer, design):
    model, text = drawn(tokenizer, design), "This is very sad"
    ids, total = tokenizer.encode(text), 0.0
    surfaces = [tokenizer.decode([token]) for token in ids]
    for place, token in enumerate(ids):
        masked = "".join([*surfaces[:place], " [MASK]" if surfaces[place].startswith(" ") else "[MASK]"])
        dag = build_dag(model, masked + "".join(surfaces[place + 1 :]))
        total += np.log(token_marginals(dag)[0, token])
    scored = score_text(model, text, None, MaskWords(tokenizer))
    assert (scored.log_prob, scored.num_tokens) == (pytest.approx(total, abs=1e-4), len(ids))


def test_molecules_are_scored_as_their_canonical_string():
    tokenizer = word_level(["C", "O", "N", "(", ")", "="])
    model = drawn(tokenizer)
    one, other, bad = score_texts(model, ["OC(C)N", "CC(N)O", "C(("], [None] * 3, SilentProgress())
    assert one.log_prob == other.log_prob < 0
    assert bad.problem.startswith("not a molecule: ")
    assert np.isnan(bad.log_prob)
    as_written = drawn(tokenizer, canonical_smiles=False)
    one, other = score_texts(as_written, ["OC(C)N", "CC(N)O"], [None] * 2, SilentProgress())
    assert one.log_prob != other.log_prob


def test_what_cannot_be_scored_is_told(tokenizer):
    model = drawn(tokenizer)
    rows = {
        ("This is so", "so"): "there is no [MASK] in",
        ("This is [MASK]", "so|very"): "has 2 words, and the text 1 mask",
        ("", None): "the text is empty",
        ("see " * 80, None): "the model takes",
    }
    texts, fillings = zip(*rows, strict=True)
    for row, message in zip(score_texts(model, texts, fillings, SilentProgress()), rows.values(), strict=True):
        assert message in row.problem
