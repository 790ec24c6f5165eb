"""SQuAD files through a fine-tuned model: both files of the official script, and scores that follow from them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import expit

from exlm_cli.errors import DataError
from exlm_cli.finetune.model import Finetuned, load_finetuned
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.applied import Applied
from exlm_cli.tasks.squad.metric import Answered, squad_metrics
from exlm_cli.tasks.squad.predict import apply_to_squad_file
from tests.unit.finetune.finetuned_runs import squad_run
from tests.unit.tasks.squad.test_task import QUESTIONS, document


@pytest.fixture(scope="module")
def finetuned(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Finetuned:
    return load_finetuned(squad_run(tmp_path_factory.mktemp("squad"), text_model), device="cpu")


def applied_to(finetuned: Finetuned, path: Path, content: Any) -> tuple[Applied, dict[str, str], dict[str, float]]:
    path.write_text(json.dumps(content), encoding="utf-8")
    applied = apply_to_squad_file(finetuned, path, path.with_name("out.json"), progress=SilentProgress())
    answers, odds = (json.loads(file.read_text()) for file in applied.files)
    return applied, answers, odds


def test_answers_are_pieces_of_their_paragraph_and_scores_follow_from_both_files(
    finetuned: Finetuned, tmp_path: Path
) -> None:
    content = document("Clocks", "Moss")
    applied, answers, odds = applied_to(finetuned, tmp_path / "dev.json", content)
    assert [file.name for file in applied.files] == ["out.json", "out-no-answer.json"]
    golds = {f"{title}-{i}": answer for title in ("Clocks", "Moss") for i, (_, answer) in enumerate(QUESTIONS[title])}
    assert list(answers) == list(odds) == list(golds)
    for article in content["data"]:
        paragraph = article["paragraphs"][0]
        assert all(answers[question["id"]] in paragraph["context"] for question in paragraph["qas"])
    assert all(0 < value < 1 for value in odds.values())
    # the official script compares probabilities with its threshold; their order is that of the differences
    questions = [Answered(answers[key], odds[key], (gold,) if gold else ()) for key, gold in golds.items()]
    for name in ("exact_match", "f1", "has_answer_f1", "no_answer_f1"):
        assert applied.metrics[name] == pytest.approx(squad_metrics(questions)[name], abs=1e-12)
    assert (applied.num_rows, applied.num_unreadable) == (5, 0)


def test_the_seeds_logits_are_averaged_and_the_runs_threshold_is_told(finetuned: Finetuned, tmp_path: Path) -> None:
    """The odds of two equal seeds are those of one."""
    first = next(iter(finetuned.runners))
    alone = Finetuned(**{**vars(finetuned), "runners": {first: finetuned.runners[first]}})
    twice = Finetuned(**{**vars(finetuned), "runners": {1: finetuned.runners[first], 2: finetuned.runners[first]}})
    _, answers, odds = applied_to(alone, tmp_path / "dev.json", document("Moss"))
    applied, same_answers, same_odds = applied_to(twice, tmp_path / "dev.json", document("Moss"))
    assert same_answers == answers
    np.testing.assert_allclose(list(same_odds.values()), list(odds.values()), atol=1e-9)
    threshold = expit(finetuned.results.metrics["valid"]["f1_threshold"].median)
    note = f"the run's own validation leaves questions unanswered above a no-answer probability of {threshold:.4g}"
    assert note in applied.notes


def test_a_test_file_without_answers_is_answered_and_not_scored(finetuned: Finetuned, tmp_path: Path) -> None:
    content = document("Moss")
    _, with_golds, _ = applied_to(finetuned, tmp_path / "dev.json", content)
    for question in content["data"][0]["paragraphs"][0]["qas"]:
        del question["answers"]
    applied, answers, _ = applied_to(finetuned, tmp_path / "test.json", content)
    assert answers == with_golds
    assert applied.metrics == {}


def test_a_question_that_cannot_be_used_is_told_and_a_file_of_such_refused(
    finetuned: Finetuned, tmp_path: Path
) -> None:
    content = document("Moss")
    questions = content["data"][0]["paragraphs"][0]["qas"]
    questions[1]["id"] = questions[0]["id"]
    applied, answers, _ = applied_to(finetuned, tmp_path / "dev.json", content)
    assert (len(answers), applied.num_rows, applied.num_unreadable) == (1, 2, 1)
    reason = "article `Moss`, paragraph 1, question `Moss-0`: another question has this id"
    assert f"left out 1 questions that cannot be used; the first: {reason}" in applied.notes
    questions[0]["question"] = questions[1]["question"] = " "
    with pytest.raises(DataError, match="question `Moss-0`: its question is empty"):
        applied_to(finetuned, tmp_path / "bad.json", content)


def test_another_layout_is_refused(finetuned: Finetuned, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        applied_to(finetuned, tmp_path / "dev.json", {"rows": []})
    assert caught.value.message == f"{tmp_path / 'dev.json'}: `data`: Field required"
