"""EM, F1 and the best threshold of SQuAD 2.0.

Pairs of answers are worked out by hand from the definition: lower case, ASCII punctuation out, articles out, blanks
joined. Thresholds are held against trying every cut between two sorted scores.
"""

import math
from fractions import Fraction

import numpy as np
import pytest

from exlm_cli.tasks.squad.metric import (
    Answered,
    apply_threshold,
    exact_match,
    f1,
    find_best_threshold,
    normalize_answer,
    squad_metrics,
)


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("", ""),
        ("The Theatre", "theatre"),
        ("a an the", ""),
        ("An answer, and the an-swer!", "answer and answer"),
        ("U.S.A.", "usa"),
        ("the-end", "theend"),  # punctuation goes first, so there is no article any more
        ("İstanbul", "i\N{COMBINING DOT ABOVE}stanbul"),  # as `str.lower` has it
        ("\N{LEFT DOUBLE QUOTATION MARK}Hi\N{RIGHT DOUBLE QUOTATION MARK}", "“hi”"),  # not ASCII: it stays
        ("the\N{NO-BREAK SPACE}sea", "sea"),
    ],
)
def test_normalising(text, normalized):
    assert normalize_answer(text) == normalized


@pytest.mark.parametrize(
    ("predicted", "golds", "em", "best_f1"),
    [
        ("the red fox", ["Red fox."], 1, 1),
        ("red fox", ["fox red"], 0, 1),  # a bag of words has no order
        ("quick red fox", ["red fox"], 0, Fraction(4, 5)),  # P 2/3, R 1
        ("red", ["a quick red fox"], 0, Fraction(1, 2)),  # P 1, R 1/3
        ("fox fox fox", ["fox"], 0, Fraction(1, 2)),  # repeated words count as often as both have them
        ("fox fox", ["fox den fox"], 0, Fraction(4, 5)),
        ("cat", ["dog", "the cat", "cat nap"], 1, 1),  # the best of several golds
        ("cat nap", ["cat", "long cat nap"], 0, Fraction(4, 5)),
        ("", [], 1, 1),  # no answer, and none given
        ("cat", [], 0, 0),
        ("", ["cat"], 0, 0),
        ("the", [], 1, 1),  # nothing is left of it
        ("", ["the", "!"], 1, 1),  # golds with nothing left are no answers
        ("cat", ["the", "cat"], 1, 1),
        ("", ["the", "cat"], 0, 0),
    ],
)
def test_exact_match_and_f1(predicted, golds, em, best_f1):
    assert exact_match(predicted, golds) == em
    assert f1(predicted, golds) == pytest.approx(float(best_f1), abs=1e-15)


def _questions(seed: int, size: int) -> tuple[list[Answered], list[float]]:
    """Return questions with distinct scores; partial credit only where there is an answer."""
    rng = np.random.default_rng(seed)
    questions, scores = [], []
    for no_answer_score in rng.normal(size=size):
        has_answer = bool(rng.random() < 0.6)
        questions.append(Answered("guess", float(no_answer_score), ("gold",) if has_answer else ()))
        scores.append(float(rng.choice([0, 0.25, 0.5, 1])) if has_answer else 0.0)
    return questions, scores


@pytest.mark.parametrize("seed", range(0, 20, 6))
def test_the_best_threshold_is_the_best_of_all_cuts(seed):
    questions, scores = _questions(seed, size=1 + seed)
    cuts = [question.no_answer_score for question in questions]
    cuts.append(min(cuts) - 1)
    best = max(sum(apply_threshold(questions, scores, cut)) / len(questions) for cut in cuts)
    score, threshold = find_best_threshold(questions, scores)
    assert score == pytest.approx(best, abs=1e-12)
    assert sum(apply_threshold(questions, scores, threshold)) / len(questions) == pytest.approx(best, abs=1e-12)


def test_sweeps_by_hand():
    for answers, scores, expected in (
        # an empty prediction costs nothing where there is no answer
        ([("", -2.0, 0), ("x", -1.0, 1)], [1, 1], (1.0, -1.0)),
        # a tie is taken one by one as officially: a cut through it counts, though a threshold of 0 gives 0.5
        ([("x", 0.0, 1), ("x", 0.0, 0)], [1, 0], (1.0, 0.0)),
    ):
        questions = [Answered(text, score, ("gold",) * num_golds) for text, score, num_golds in answers]
        assert find_best_threshold(questions, scores) == expected


def test_without_questions_no_score_is_defined():
    assert all(map(math.isnan, squad_metrics([]).values()))
    assert all(map(math.isnan, squad_metrics([], threshold=0.0).values()))


def test_a_question_at_the_threshold_is_answered_and_one_above_is_not():
    questions = [Answered("x", 1.0, ("gold",)), Answered("x", 1.5, ("gold",)), Answered("x", 1.5, ())]
    assert apply_threshold(questions, [0.5, 0.5, 0.0], 1.0) == [0.5, 0.0, 1.0]


def test_the_metrics_of_a_small_set_by_hand():
    """Sorted: a (EM 1), b (F1 2/3), c (no answer), d (EM 1 but the model is surest that there is none)."""
    questions = [
        Answered("Rome", -5.0, ("Rome", "the city of Rome")),
        Answered("red fox", -1.0, ("fox",)),
        Answered("blue", 1.0, ()),
        Answered("green", 2.0, ("Green",)),
    ]
    metrics = squad_metrics(questions)
    # EM sweep: start 1, a 2, b 2, c 1, d 2: best 2 at a. F1 sweep: start 1, a 2, b 2 2/3, c 1 2/3, d 2 2/3.
    expected = {
        "exact_match": 2 / 4,
        "f1": (2 + 2 / 3) / 4,
        "exact_match_threshold": -5.0,
        "f1_threshold": -1.0,
        "exact_match_at_0": 2 / 4,
        "f1_at_0": (2 + 2 / 3) / 4,
        "has_answer_exact_match": 1 / 3,
        "has_answer_f1": (1 + 2 / 3) / 3,
        "no_answer_exact_match": 1.0,
        "no_answer_f1": 1.0,
    }
    assert metrics == pytest.approx(expected, abs=1e-12)


def test_groups_are_scored_at_the_threshold_of_f1_and_not_at_its_score():
    """F1 is 1 with the first question alone answered; at a threshold of 1, that score, the second would be as well."""
    metrics = squad_metrics([Answered("Rome", -5.0, ("Rome",)), Answered("blue", -1.0, ())])
    assert (metrics["f1"], metrics["f1_threshold"]) == (1.0, -5.0)
    assert (metrics["has_answer_f1"], metrics["no_answer_f1"]) == (1.0, 1.0)
