"""N best fillings against a full enumeration of paths and tokens on small DAGs; the guess against marginals."""

import itertools
import math
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from exlm_cli.dag import search as filling_search
from exlm_cli.dag.fillings import independent_guess, n_best_fillings
from exlm_cli.dag.graph import Dag
from exlm_cli.dag.search import Length
from tests.unit.dag.dags import PieceTokenizer, enumerate_fillings, enumerate_paths, handmade_dag, random_dag

CASES: list[tuple[int, int, int, Length]] = [
    (1, 1, 3, "exact"), (2, 2, 3, "exact"), (3, 1, 4, "exact"), (2, 3, 3, "exact"),
    (2, 2, 3, "any"), (1, 4, 3, "any"), (3, 1, 3, "any"),
]  # fmt: skip


def _probability_of_texts(dag: Dag, length: Length) -> dict[str, float]:
    """Every text with its probability, best first."""
    texts: dict[str, float] = defaultdict(float)
    for tokens_by_mask, probability in enumerate_fillings(dag, length).items():
        texts[dag.fill(tokens_by_mask)] += probability
    return dict(sorted(texts.items(), key=lambda item: -item[1]))


def _assert_best(dag: Dag, n: int, length: Length) -> None:
    every = _probability_of_texts(dag, length)
    found = n_best_fillings(dag, n, length)
    assert found.is_proven
    shares = [(f.text, math.exp(f.log_prob)) for f in found.fillings]
    assert [text for text, _ in shares] == [*every][:n]
    assert dict(shares) == pytest.approx({text: every[text] for text, _ in shares}, abs=1e-12)
    guess = independent_guess(dag, length).filling
    assert math.exp(guess.log_prob) == pytest.approx(every[guess.text], abs=1e-12)
    if length == "any":
        for filling in found.fillings:
            owners = [mask for mask, ids in enumerate(filling.tokens_by_mask) for _ in ids]
            assert owners == dag.node_mask[list(filling.path)].tolist()


@pytest.mark.parametrize("n", [5, 10_000])
@pytest.mark.parametrize(("num_masks", "k", "vocab_size", "length"), CASES)
def test_the_n_best_and_the_guess_have_the_probabilities_of_the_enumeration(num_masks, k, vocab_size, length, n):
    _assert_best(random_dag(num_masks, k, vocab_size, seed=n), n, length)


@pytest.mark.parametrize(("num_masks", "k", "parted"), [(2, 2, 0), (3, 1, 0), (3, 2, 0), (3, 2, 1)])
def test_neighbouring_masks_share_the_probability_of_a_text(num_masks, k, parted):
    """Of any length, masks without text between them yield a text in several ways; all of them count."""
    dag = random_dag(num_masks, k, 3, seed=0)
    mask_id, cls_id, sep_id = dag.tokenizer.mask_id, dag.tokenizer.cls_id, dag.tokenizer.sep_id
    between = [[mask_id, 25] if mask + 1 == parted else [mask_id] for mask in range(num_masks)]
    dag = replace(dag, input_ids=np.array([cls_id, *itertools.chain(*between), sep_id]))
    assert dag.mask_run.tolist() == [int(0 < parted <= mask) for mask in range(num_masks)]
    _assert_best(dag, 5, "any")
    assert all(len(ids) == 1 for ids in independent_guess(dag, "any").filling.tokens_by_mask)


@pytest.mark.parametrize(("num_masks", "k", "vocab_size", "length"), [*CASES, (3, 2, 8, "exact")])
def test_a_beam_that_is_too_narrow_is_widened_until_nothing_can_be_missing(
    num_masks, k, vocab_size, length, monkeypatch
):
    monkeypatch.setattr(filling_search, "_FIRST_WIDTH", 1)
    monkeypatch.setattr(filling_search, "_FIRST_TOKENS_PER_NODE", 1)
    for seed in range(4):
        dag = random_dag(num_masks, k, vocab_size, seed, sharpness=0.5)
        (best,) = n_best_fillings(dag, 1, length).fillings
        text, probability = next(iter(_probability_of_texts(dag, length).items()))
        assert best.text == text
        assert math.exp(best.log_prob) == pytest.approx(probability, abs=1e-12)


@pytest.mark.parametrize("length", ["exact", "any"])
def test_the_path_of_a_filling_is_its_best_alignment(length):
    dag = random_dag(2, 2, 3, seed=6)
    emit = np.exp(dag.node_log_probs)
    paths = dict(enumerate_paths(dag, [2] if length == "exact" else range(5)))
    for filling in n_best_fillings(dag, 6, length).fillings:
        tokens = [y for mask in filling.tokens_by_mask for y in mask]
        owners = [m for m, mask in enumerate(filling.tokens_by_mask) for _ in mask]
        scores = {
            nodes: p * np.prod([emit[u, y] for u, y in zip(nodes, tokens, strict=True)])
            for nodes, p in paths.items()
            if len(nodes) == len(tokens) and (length == "exact" or [dag.node_mask[u] for u in nodes] == owners)
        }
        assert filling.path == max(scores, key=lambda nodes: scores[nodes])


def test_a_mask_may_yield_two_tokens_and_another_none():
    """App. Q.3: "so good" for the first mask; the second stays empty."""
    nodes = [{"so": 0.98, "happy": 0.01}, {"good": 0.98, "happy": 0.01}, {"happy": 0.98, "so": 0.01}, {"so": 1.0}]
    edges = {0: {1: 1.0}, 1: {2: 1.0}, 2: {3: 0.25, 5: 0.75}, 3: {4: 0.0, 5: 1.0}, 4: {5: 1.0}}
    dag = handmade_dag("This is [MASK], and I'm very [MASK].", nodes, edges, 2)
    best = n_best_fillings(dag, 1, "any").fillings[0]
    assert best.text == "This is so good, and I'm very."
    assert best.path == (1, 2)
    assert math.exp(best.log_prob) == pytest.approx(0.98**2 * 0.75)
    exact = n_best_fillings(dag, 1).fillings[0]
    assert exact.text == "This is so, and I'm very good."


def test_token_sequences_that_read_the_same_are_added_up():
    tokenizer = PieceTokenizer(["g", "lad", "gl", "ad", "<"])
    probs = np.array([[0] * 4, [0.6, 0, 0.4, 0], [0, 0.7, 0, 0.3], [0] * 4])
    ids = np.array([4, tokenizer.mask_id, tokenizer.mask_id])
    with np.errstate(divide="ignore"):
        numbers = np.log(probs), np.log(np.diag([1.0] * 3, 1))
    dag = Dag("<[MASK][MASK]", "text", lambda: numbers, 1, ids, tokenizer)
    best = n_best_fillings(dag, 4).fillings
    shares = {f.text: math.exp(f.log_prob) for f in best}
    assert shares == pytest.approx({"<glad": 0.6 * 0.7 + 0.4 * 0.3, "<gad": 0.6 * 0.3, "<gllad": 0.4 * 0.7})
    assert best[0].tokens_by_mask == ((0,), (1,))


def test_tokens_that_are_parts_of_a_character_are_not_added_up_although_they_read_the_same():
    """Each decodes to U+FFFD; added up, the share of the first grew with the number of fillings."""
    tokenizer = PieceTokenizer(["\ufffd", "\ufffd", "\ufffd", ".", "<"])
    ids = np.array([4, tokenizer.mask_id])
    with np.errstate(divide="ignore"):
        numbers = np.log([[0] * 4, [0.2, 0.3, 0.1, 0.4], [0] * 4]), np.log(np.diag([1.0] * 2, 1))
    dag = Dag("<[MASK]", "text", lambda: numbers, 1, ids, tokenizer)
    for n in range(1, 5):
        best = n_best_fillings(dag, n).fillings
        expected = [(((3,),), "<."), (((1,),), "<\ufffd"), (((0,),), "<\ufffd"), (((2,),), "<\ufffd")]
        assert [(f.tokens_by_mask, f.text) for f in best] == expected[:n]
        assert [math.exp(f.log_prob) for f in best] == pytest.approx([0.4, 0.3, 0.2, 0.1][:n])


def test_many_alignments_of_one_text_do_not_crowd_out_the_others():
    """A collapsed DAG: all states alike, so a text has C(20, 5) = 15,504 equally probable alignments."""
    words = [{"a": 0.5, "b": 0.3, "c": 0.2}] * 20
    edges = {v: dict.fromkeys(range(v + 1, 22), 1 / (21 - v)) for v in range(21)}
    found = n_best_fillings(handmade_dag(" ".join(["[MASK]"] * 5), words, edges, 4), 10)
    assert len({f.text for f in found.fillings}) == 10
    assert found.is_proven
    share = math.exp(found.fillings[0].log_prob - found.log_prob_length)
    assert share == pytest.approx(0.5**5, rel=1e-6)


@pytest.mark.parametrize("limit", ["MAX_CANDIDATES", "MAX_WORK"])
def test_a_search_that_meets_its_limit_says_so_and_still_finds_fillings(monkeypatch, limit):
    monkeypatch.setattr(filling_search, limit, 0)
    found = n_best_fillings(random_dag(8, 3, 26, seed=0, sharpness=0.1), 10)
    assert not found.is_proven
    assert len(found.fillings) == 10


def test_the_guess_takes_the_best_token_of_every_marginal():
    """Given one token a mask, also beside fillings of any length."""
    dag = random_dag(2, 3, 4, seed=8)
    truth = enumerate_fillings(dag, "exact")
    marginals = np.zeros((2, 4))
    for tokens, probability in truth.items():
        for mask, (token,) in enumerate(tokens):
            marginals[mask, token] += probability / sum(truth.values())
    lengths: tuple[Length, ...] = ("exact", "any")
    for length in lengths:
        guess = independent_guess(dag, length)
        assert guess.filling.tokens_by_mask == tuple((int(y),) for y in marginals.argmax(axis=1))
        assert guess.token_probs == pytest.approx(marginals.max(axis=1))
        assert guess.prob_independent == pytest.approx(marginals.max(axis=1).prod())


def test_a_guess_without_a_path_keeps_its_text():
    """The likeliest first token, x, and the likeliest second one, b, never come together."""
    nodes = [{"x": 1.0}, {"y": 1.0}, {"z": 1.0}, {"a": 1.0}, {"b": 1.0}, {"b": 1.0}]
    edges = {0: {1: 0.4, 2: 0.3, 3: 0.3}, 1: {4: 1.0}, 2: {5: 1.0}, 3: {6: 1.0}, **{v: {7: 1.0} for v in (4, 5, 6)}}
    dag = handmade_dag("I [MASK], you [MASK].", nodes, edges, 3)
    lengths: tuple[Length, ...] = ("exact", "any")
    for length in lengths:
        guess = independent_guess(dag, length)
        assert guess.filling.text == "I x, you b."
        assert guess.filling.log_prob == -math.inf
