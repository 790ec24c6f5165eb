"""SQuAD 2.0 as a task. Paragraphs are written here; logits that point at the answers must score 1."""

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from scipy.special import expit

from exlm_cli.config.tasks import SquadTaskConfig
from exlm_cli.data.tokenizer import Tokenizer, train_bpe
from exlm_cli.errors import ConfigError, DataError
from exlm_cli.finetune.cells.trainer import encode_task
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.base import EncodedSplit, FloatArray, NewRows, TrainedTask
from exlm_cli.tasks.squad.metric import Answered, squad_metrics
from exlm_cli.tasks.squad.task import SquadTask, load_squad, read_new_questions
from tests.unit.tasks.rows.test_splits import as_lists

PARAGRAPHS = {
    "Moss": "Moss grows on the north side of the old stones, and in wet summers it covers them.",
    "Clocks": "The tower clock of Lund was built in 1424. It shows the moon and two small knights.",
    "Tea": "Tea leaves are picked in spring; the second harvest is cheaper.",
}
QUESTIONS: dict[str, list[tuple[str, str | None]]] = {
    "Moss": [("Where does moss grow?", "the north side"), ("Who planted the moss?", None)],
    "Clocks": [("When was it built?", "1424"), ("What does it show?", "the moon"), ("Who paid for it?", None)],
    "Tea": [("When are leaves picked?", "spring"), ("Who drinks it?", None)],
}


def document(*titles: str) -> dict[str, Any]:
    articles = []
    for title in titles:
        context = PARAGRAPHS[title]
        qas = []
        for number, (text, answer) in enumerate(QUESTIONS[title]):
            answers = [] if answer is None else [{"text": answer, "answer_start": context.index(answer)}]
            qas.append({"id": f"{title}-{number}", "question": text, "answers": answers, "is_impossible": not answers})
        articles.append({"title": title, "paragraphs": [{"context": context, "qas": qas}]})
    return {"version": "v2.0", "data": articles}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(
        [*PARAGRAPHS.values(), *(q for own in QUESTIONS.values() for q, _ in own)] * 5, 400, 2, SilentProgress()
    )


def load(folder: Path, **values: Any) -> SquadTask:
    return load_squad(SquadTaskConfig(name="squad/v2", data_dir=str(folder), **values), SilentProgress())


def write(folder: Path, name: str, *titles: str) -> Path:
    (folder / name).write_text(json.dumps(document(*titles)), encoding="utf-8")
    return folder


@pytest.fixture
def official(tmp_path: Path) -> Path:
    write(tmp_path, "train-v2.0.json", "Moss", "Tea")
    return write(tmp_path, "dev-v2.0.json", "Clocks")


def pointing(encoded: EncodedSplit, strength: float = 10.0) -> list[FloatArray]:
    """Return logits that are `strength` at each window's target and 0 elsewhere."""
    outputs = []
    for ids, (first, last) in zip(encoded.token_ids, encoded.targets.astype(int), strict=True):
        logits = np.zeros((len(ids), 2))
        logits[first, 0] = logits[last, 1] = strength
        outputs.append(logits)
    return outputs


@pytest.mark.parametrize(("length", "stride"), [(200, 128), (24, 6), (20, 3)])
def test_logits_that_point_at_the_answers_score_one(official, tokenizer, length, stride):
    encoded = load(official, doc_stride=stride).encode("valid", tokenizer, length)
    assert encoded.answerable is not None
    assert len(encoded) == 3 or length < 200
    assert max(len(ids) for ids in encoded.token_ids) <= length
    assert all(a[t].all() for a, t in zip(encoded.answerable, encoded.targets.astype(int), strict=True))
    metrics = encoded.score([pointing(encoded)])
    exact = ("exact_match", "f1", "exact_match_at_0", "f1_at_0", "has_answer_exact_match", "no_answer_f1")
    assert [metrics[name] for name in exact] == [1.0] * len(exact)


def test_the_best_answer_and_its_odds_are_told_for_each_question(official, tokenizer):
    task = load(official, doc_stride=6)
    encoded = task.encode("valid", tokenizer, 24)
    pointed = pointing(encoded)
    by_id = encoded.answer([pointed])
    answers = list(by_id.values())
    assert [answer.text for answer in answers[:2]] == ["1424", "the moon"]
    assert [answer.golds for answer in answers] == [("1424",), ("the moon",), ()]
    # the window with the answer has 0 at [CLS] and 20 at its span; without any, [CLS] has 20 in every window
    assert [answer.no_answer_score for answer in answers] == [-20, -20, 20]
    encoded.write_answers(official, "valid", [pointed])
    texts, scores = (json.loads((official / f"{name}-valid.json").read_text()) for name in ("predictions", "no-answer"))
    assert texts == {key: answer.text for key, answer in by_id.items()}
    assert scores == {"Clocks-0": -20, "Clocks-1": -20, "Clocks-2": 20}


def test_a_model_whose_answers_are_all_wrong_answers_nothing_and_says_so(official, tokenizer):
    encoded = load(official).encode("valid", tokenizer, 200)
    pointed = pointing(encoded)
    assert encoded.describe_outputs([pointed]) == []
    assert len(encoded.describe_outputs([[logits[::-1].copy() for logits in pointed]])) == 1


def test_margins_are_those_of_the_mean_of_the_seeds(official, tokenizer):
    """One seed points at the answers, the other at nothing but [CLS]: the mean has half of each, by hand."""
    encoded = load(official).encode("valid", tokenizer, 200)
    silent = [np.zeros_like(logits) for logits in pointing(encoded)]
    for logits in silent:
        logits[0] = 4.0
    found = encoded.prediction_columns([pointing(encoded), silent])
    # answered: 2 * 10 / 2 for the span, 2 * 4 / 2 for [CLS]; the third question: 0 for any span, (20 + 8) / 2 for [CLS]
    np.testing.assert_allclose([float(cell) for cell in found["answer_margin"]], [6, 6, -14])
    np.testing.assert_allclose([float(cell) for cell in found["no_answer_probability"]], expit([-6, -6, 14]))


def test_a_run_is_known_by_all_that_its_scores_depend_on(official, tokenizer):
    """The encoded examples hold the first gold answer alone, and no length of answers."""

    def fingerprint(**values: Any) -> str:
        return encode_task(load(official, **values), tokenizer, 200, 1).fingerprint

    first = fingerprint()
    assert fingerprint() == first
    assert fingerprint(max_answer_tokens=4) != first
    content = document("Clocks")
    (paragraph,) = content["data"][0]["paragraphs"]
    paragraph["qas"][0]["answers"].append({"text": "in 1424", "answer_start": paragraph["context"].index("in 1424")})
    (official / "dev-v2.0.json").write_text(json.dumps(content), encoding="utf-8")
    assert fingerprint() != first


def test_cut_questions_and_answers_that_no_window_holds_whole_are_counted(official, tokenizer):
    encoded = load(official, max_query_tokens=2).encode("valid", tokenizer, 200)
    assert {int(np.flatnonzero(ids == tokenizer.sep_id)[0]) for ids in encoded.token_ids} == {3}
    assert any("`task.max_query_tokens`" in note for note in encoded.notes)
    encoded = load(official, doc_stride=1, max_query_tokens=4).encode("train", tokenizer, 8)
    assert (encoded.targets[: len(encoded) // 2] == 0).all()
    assert any("1 question; it trains as unanswerable" in note for note in encoded.notes)
    # room is kept for the longest question that the recipe allows: [CLS], 17 tokens and two [SEP] of 30 leave ten
    with pytest.raises(ConfigError, match=r"`task\.doc_stride` 11 "):
        load(official, doc_stride=11, max_query_tokens=17).encode("train", tokenizer, 30)


def test_official_and_named_files_are_read_alone(official):
    task = load(official)
    assert (task.split_name, as_lists(task.split_indices)) == ("official", {"train": [0, 1, 2, 3], "valid": [0, 1, 2]})
    numbers = ("130,319", "11,873", "2 of 4", "1 of 3")
    assert all(number in note for number, note in zip(numbers, task.notes[1:], strict=True))
    task = load(official, files={"train": "dev-v2.0.json", "valid": "train-v2.0.json"})
    assert (task.split_sizes, task.split_name) == ({"train": 3, "valid": 4}, "files")
    held_out = load(official, files={"train": "train-v2.0.json"}, valid_articles=("Tea",))
    assert held_out.split_sizes == {"train": 2, "valid": 2}
    with pytest.raises(DataError, match=r"`task\.valid_articles` holds articles out"):
        load(official, valid_articles=("Tea",))


def test_the_last_two_articles_are_held_out_where_there_is_no_dev_file(tmp_path):
    task = load(write(tmp_path, "train-v2.0.partial.json", "Moss", "Clocks", "Tea"))
    assert as_lists(task.split_indices) == {"train": [0, 1], "valid": [2, 3, 4, 5, 6]}
    assert any(note.startswith("scored on questions about `Clocks`, `Tea`, held out of ") for note in task.notes)
    assert task.split_name == "held out: Clocks, Tea"
    for titles, message, hint in (
        (("Tee",), "no article `Tee`", "`Tea`?"),
        (("Xylophone",), "no article `Xylophone`", "`Moss`, `Clocks`, `Tea`"),
        (("Tea", "Moss", "Clocks"), "all 3 articles", "task.files.valid=FILE"),
    ):
        with pytest.raises(DataError, match=re.escape(f"{tmp_path}/train-v2.0.partial.json: {message}")) as caught:
            load(tmp_path, valid_articles=titles)
        assert hint in caught.value.hint


def test_questions_that_cannot_be_used_stop_or_are_left_out_and_told(tmp_path):
    content = document("Moss", "Clocks", "Tea")
    content["data"][0]["paragraphs"][0]["qas"][1]["question"] = ""
    (tmp_path / "train-v2.0.json").write_text(json.dumps(content), encoding="utf-8")
    place = "article `Moss`, paragraph 1, question `Moss-1`"
    task = load(tmp_path)
    assert task.split_indices["train"].tolist() == [0]
    assert any(place in note for note in task.notes)
    assert [(row.file, row.row) for row in task.skipped] == [(f"{tmp_path}/train-v2.0.json", place)]
    with pytest.raises(DataError, match=re.escape(f"{tmp_path}/train-v2.0.json: {place}: ")) as caught:
        load(tmp_path, on_invalid="error")
    assert "`--set task.on_invalid=skip`" in caught.value.hint
    for qa in (qa for article in content["data"] for paragraph in article["paragraphs"] for qa in paragraph["qas"]):
        qa["question"] = ""
    (tmp_path / "train-v2.0.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(DataError, match="its question is empty"):
        load(tmp_path)


def test_the_hub_is_read_where_no_folder_is_given(monkeypatch):
    asked = []

    def load_dataset(name: str, config: str | None, *, split: str, **_: Any) -> datasets.IterableDataset:
        asked.append((name, config, split))
        row = {"id": split, "title": "Moss", "context": PARAGRAPHS["Moss"], "question": "Where does moss grow?"}
        answers = {"text": ["the north side"], "answer_start": [14]}
        return datasets.Dataset.from_list([row | {"answers": answers}]).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = load_squad(SquadTaskConfig(name="squad/v2"), SilentProgress())
    assert asked == [("rajpurkar/squad_v2", None, "train"), ("rajpurkar/squad_v2", None, "validation")]
    assert task.split_sizes == {"train": 1, "valid": 1}


def new_questions(path: Path, content: Any, threshold: float | None = None) -> NewRows:
    path.write_text(json.dumps(content), encoding="utf-8")
    task = TrainedTask(SquadTaskConfig(name="squad/v2"), "text", "span", ("start", "end"), threshold)
    return read_new_questions(task, path, (), SilentProgress())


def test_new_questions_are_answered_and_scores_follow_from_both_files(tokenizer, tmp_path):
    """Two seeds are averaged: with one that is all zeros, what the other one says counts by half."""
    content = document("Clocks", "Moss")
    questions = new_questions(tmp_path / "dev.json", content, threshold=1.5)
    encoded = questions.encode(tokenizer, 200)
    rng = np.random.default_rng(0)
    outputs = [rng.normal(size=(len(ids), 2)).astype(np.float32) for ids in encoded.token_ids]
    zeros = [np.zeros_like(logits) for logits in outputs]
    halves = [logits / 2 for logits in outputs]
    answers, odds = map(json.loads, encoded.official_files([outputs, zeros]))
    columns = encoded.prediction_columns([outputs, zeros])
    table, _ = questions.as_csv(columns)
    details = list(csv.DictReader(table.decode().splitlines()))
    assert {row["id"]: row["answer"] for row in details} == answers
    # the other seed's scores are all 0: its no-answer probability is 1/2, and the mean's difference half of the first's
    difference = 2 * math.log(odds["Clocks-0"] / (1 - odds["Clocks-0"]))
    spread = abs(1 / (1 + math.exp(-difference)) - 0.5) / math.sqrt(2)
    assert float(details[0]["no_answer_seed_spread"]) == pytest.approx(spread, rel=1e-4)
    assert set(encoded.prediction_columns([outputs, outputs])["answer_seed_agreement"]) == {"1"}
    assert [json.loads(row["answers"]) for row in details[:3]] == [["1424"], ["the moon"], []]
    golds = {f"{title}-{i}": answer for title in ("Clocks", "Moss") for i, (_, answer) in enumerate(QUESTIONS[title])}
    assert list(answers) == list(odds) == list(golds)
    # the official script compares probabilities with its threshold; their order is that of the differences
    answered = [Answered(answers[key], odds[key], (gold,) if gold else ()) for key, gold in golds.items()]
    scores = encoded.score([outputs, zeros])
    for name in ("exact_match", "f1", "has_answer_f1", "no_answer_f1"):
        assert scores[name] == pytest.approx(squad_metrics(answered, threshold=expit(1.5))[name], abs=1e-12)
    assert "f1_threshold" not in scores
    assert f"{expit(1.5):.4g}" in questions.notes[-1]
    best = new_questions(tmp_path / "dev.json", content).encode(tokenizer, 200).score([outputs, zeros])
    assert best["f1"] == pytest.approx(squad_metrics(answered)["f1"], abs=1e-12)
    assert encoded.score([halves]) == scores


def test_questions_without_answers_are_not_scored_and_bad_ones_are_skipped(tokenizer, tmp_path):
    content = document("Moss")
    asked = content["data"][0]["paragraphs"][0]["qas"]
    del asked[0]["answers"]
    asked[1]["id"] = asked[0]["id"]
    questions = new_questions(tmp_path / "test.json", content)
    encoded = questions.encode(tokenizer, 200)
    assert (encoded.is_labelled, questions.num_rows, len(questions.keys)) == (False, 2, 1)
    assert "left out 1 question that cannot be used" in questions.notes[-1]
    asked[0]["question"] = asked[1]["question"] = " "
    with pytest.raises(DataError, match="question `Moss-0`: its question is empty"):
        new_questions(tmp_path / "bad.json", content)
