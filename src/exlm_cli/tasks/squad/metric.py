"""Metrics of SQuAD 2.0 as the official evaluation defines them, and the threshold for leaving a question unanswered.

All scores are shares in [0, 1]; the official script prints them in percent. Written from the definition and
tested against examples worked out by hand (`tests/unit/tasks/squad/test_metric.py`).
"""

import math
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Return an answer in lower case, without ASCII punctuation, then without articles, with single blanks."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(predicted: str, golds: Sequence[str]) -> float:
    """Return 1 if a prediction, empty for "no answer", equals any of the gold answers after normalisation, else 0.

    Gold answers that are empty after normalisation do not count; if none remains, the right answer is the empty one.
    """
    return float(any(normalize_answer(predicted) == normalize_answer(gold) for gold in _scorable(golds)))


def f1(predicted: str, golds: Sequence[str]) -> float:
    """Return the F1 of two bags of normalised words, the best over the gold answers that `exact_match` counts.

    Where one bag is empty, F1 is 1 if both are, else 0.
    """
    return max(_word_f1(predicted, gold) for gold in _scorable(golds))


def _word_f1(predicted: str, gold: str) -> float:
    predicted_words, gold_words = normalize_answer(predicted).split(), normalize_answer(gold).split()
    if predicted_words == gold_words:
        return 1.0  # also of two empty bags, where the formula divides by 0
    num_same = (Counter(predicted_words) & Counter(gold_words)).total()
    # 2PR / (P + R) with P = same / predicted and R = same / gold
    return 2 * num_same / (len(predicted_words) + len(gold_words))


def _scorable(golds: Sequence[str]) -> list[str]:
    return [gold for gold in golds if normalize_answer(gold)] or [""]


@dataclass(frozen=True)
class Answered:
    """Answer of a model to one question, and the gold answers.

    Attributes:
        text: The best answer, even if the model finds it more likely that there is none.
        no_answer_score: Null score minus the score of `text`; the greater, the likelier there is no answer.
        golds: Gold answers; none if the question has no answer.
    """

    text: str
    no_answer_score: float
    golds: tuple[str, ...]

    @property
    def margin(self) -> float:
        """Score of `text` minus the null score; the greater, the likelier there is an answer."""
        return -self.no_answer_score

    @property
    def has_answer(self) -> bool:
        """Whether the question can be answered."""
        return bool(self.golds)


def find_best_threshold(questions: Sequence[Answered], scores: Sequence[float]) -> tuple[float, float]:
    """Find the threshold with the best mean score, as `find_best_thresh` of the official script does.

    It begins with no question answered, which scores 1 on each question without an answer, and then answers one
    question after the other, in ascending order of `no_answer_score`. An answered question adds its score if it has an
    answer, and takes 1 away if it has none (0 if the prediction is empty). Questions of equal `no_answer_score` are
    answered one by one in the order given, as in that script, though no threshold separates them.

    Args:
        questions: Questions of a set.
        scores: Exact match or F1 of each question's `text`.

    Returns:
        Mean score and threshold: the `no_answer_score` of the last question answered. If none should be answered, it is
        1 below the lowest: the official script gives 0, which means the same for probabilities, not for differences.
        NaN for both without a question.
    """
    if not questions:
        return math.nan, math.nan
    order = sorted(range(len(questions)), key=lambda index: questions[index].no_answer_score)
    current = best = float(sum(not question.has_answer for question in questions))
    threshold = questions[order[0]].no_answer_score - 1.0
    for index in order:
        question = questions[index]
        if question.has_answer:
            current += scores[index]
        elif question.text:
            current -= 1.0
        if current > best:
            best, threshold = current, question.no_answer_score
    return best / len(questions), threshold


def apply_threshold(questions: Sequence[Answered], scores: Sequence[float], threshold: float) -> list[float]:
    """Return the score of each question when those above the threshold are left unanswered."""
    return [
        float(not question.has_answer) if question.no_answer_score > threshold else score
        for question, score in zip(questions, scores, strict=True)
    ]


def squad_metrics(questions: Sequence[Answered], threshold: float | None = None) -> dict[str, float]:
    """Score the answers of a whole set.

    Args:
        threshold: Threshold of a run for scores on other questions than those it was chosen on. None: the best ones of
            this set are found.

    Returns:
        `exact_match`, `f1`: at the given threshold, or at their best ones (`best_exact` and `best_f1` of the official
        script, which papers report), with `exact_match_threshold`, `f1_threshold`; `exact_match_at_0`, `f1_at_0`: at
        threshold 0, where nothing is tuned; `has_answer_...`, `no_answer_...`: means at the threshold of F1 over the
        questions that have an answer and over those that have none, NaN if there is no such question.
    """
    scores = {
        "exact_match": [exact_match(question.text, question.golds) for question in questions],
        "f1": [f1(question.text, question.golds) for question in questions],
    }
    if threshold is None:
        best = {name: find_best_threshold(questions, values) for name, values in scores.items()}
        metrics = {name: score for name, (score, _) in best.items()}
        metrics |= {f"{name}_threshold": at for name, (_, at) in best.items()}
        threshold = best["f1"][1]
    else:
        metrics = {name: _mean(apply_threshold(questions, values, threshold)) for name, values in scores.items()}
    metrics |= {f"{name}_at_0": _mean(apply_threshold(questions, values, 0.0)) for name, values in scores.items()}
    at_best = {name: apply_threshold(questions, values, threshold) for name, values in scores.items()}
    for group, has_answer in (("has_answer", True), ("no_answer", False)):
        members = [index for index, question in enumerate(questions) if question.has_answer == has_answer]
        metrics |= {f"{group}_{name}": _mean([values[index] for index in members]) for name, values in at_best.items()}
    return metrics


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
