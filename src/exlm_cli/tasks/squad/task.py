"""SQuAD 2.0: questions on paragraphs, answered with a piece of the paragraph or with nothing."""

import difflib
import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from exlm_cli.config.tasks import SquadTaskConfig
from exlm_cli.data.rows.hub import HubSource, iter_hub_records
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.errors import DataError
from exlm_cli.files import json_bytes, write_json
from exlm_cli.format import format_number_of, name_some
from exlm_cli.progress import Progress
from exlm_cli.tasks.base import (
    DownstreamTask,
    EncodedSplit,
    FloatArray,
    Loss,
    NewRows,
    SeedOutputs,
    Split,
    SplitIndices,
    TrainedTask,
)
from exlm_cli.tasks.rows.splits import choose_rows
from exlm_cli.tasks.sources import LOCAL_HINT, OfficialFiles, counted, find_parts
from exlm_cli.tasks.squad.files import NUM_QUESTIONS, SquadFile, SquadQuestion, read_squad_json, read_squad_rows
from exlm_cli.tasks.squad.metric import Answered, f1, find_best_threshold, normalize_answer, squad_metrics
from exlm_cli.tasks.squad.windows import EncodedContext, Window, best_answer, build_windows, room_for_paragraph

NUM_HELD_OUT_ARTICLES = 2

OFFICIAL_FILES = OfficialFiles(
    "rajpurkar/squad_v2",
    None,
    ("SQuAD", "squad", "squad2", "squad-v2"),
    {"train": ("train-v2.0*", "train"), "valid": ("dev-v2.0*", "validation")},
    (".json",),
    ("valid",),
)

_PROTOCOL_NOTE = (
    "SQuAD 2.0 has no public test answers: `valid` is what the paper reports; best epoch and no-answer threshold "
    "are chosen on `valid` too"
)


def load_squad(config: SquadTaskConfig, progress: Progress) -> "SquadTask":
    """Read the questions to train and to score on.

    They come from `task.files`; else from `train-v2.0*.json` and `dev-v2.0*.json` in `task.data_dir`; else from the
    Hub. Without a file to score on, the articles `task.valid_articles` are held out of the training file, or its last
    two.

    Raises:
        DataError: A file is missing or malformed, a question cannot be used while `task.on_invalid` is `error`, an
            article to hold out does not exist, or articles are held out though there is a file to score on.
    """
    files = {part: _read(place, progress) for part, place in find_parts(config, OFFICIAL_FILES)}
    train_file, valid_file = files["train"], files.get("valid")
    notes = [_PROTOCOL_NOTE]
    for split, file in (("train", train_file), ("valid", valid_file)):
        if file is not None:
            notes += _file_notes(file, split, config)
    if valid_file is not None:
        if config.valid_articles:
            raise DataError(
                f"`task.valid_articles` holds articles out, but there is {valid_file.source} to score on",
                "leave it out, or name the training file alone with `--set task.files.train=FILE`",
            )
        train, valid = train_file.questions, valid_file.questions
        split_name = "official" if config.files.valid is None else "files"
    else:
        train, valid, held_out = _hold_out(train_file, config.valid_articles)
        split_name = f"held out: {', '.join(held_out)}"
        notes.append(
            f"scored on questions about {_listed(held_out)}, held out of {Path(train_file.source).name}: no official "
            "development set, so not the paper's numbers"
        )
    parts: dict[Split, list[SquadQuestion]] = {"train": train, "valid": valid}
    for split, questions in parts.items():
        chosen, limit_notes = choose_rows(config, split, len(questions), "questions")
        parts[split] = questions = [questions[index] for index in chosen]
        notes += limit_notes
        num_without = sum(not question.answers for question in questions)
        notes.append(f"{split}: {num_without:,} of {len(questions):,} questions have no answer")
    task = SquadTask(config, parts)
    task.split_name = split_name
    task.notes = tuple(notes)
    task.skipped = tuple(row for file in (train_file, valid_file) if file is not None for row in file.skipped)
    return task


@final
class SquadTask(DownstreamTask):
    """Questions: one example for each window, one score for each question.

    `score_fingerprint` is the SHA-256 of the longest answer allowed, and of each question's id, paragraph and answers.
    """

    name = "squad/v2"
    loss: Loss = "span"
    output_names = ("start", "end")
    selection_metric = "f1"
    splits: tuple[Split, ...] = ("train", "valid")

    def __init__(self, config: SquadTaskConfig, questions: dict[Split, list[SquadQuestion]]) -> None:
        self._config, self._questions = config, questions
        self.training_keys = [_key(question) for question in questions.get("train", ())]
        self.validation_keys = [_key(question) for question in questions["valid"]]
        digest = hashlib.sha256(str(config.max_answer_tokens).encode())
        for question in questions["valid"]:
            digest.update(repr((question.id, question.context, question.answers)).encode())
        self.score_fingerprint = digest.hexdigest()

    @property
    def split_indices(self) -> SplitIndices:
        """Numbers of the questions of each split in their file, counted from 0."""
        return {split: np.array([q.row for q in self._questions[split]], dtype=np.int64) for split in self.splits}

    def encode(self, split: Split, tokenizer: Tokenizer, sequence_length: int) -> "ScoredQuestions":
        """Cut a split into windows; a target is the first gold answer.

        Raises:
            ConfigError: `task.doc_stride` is more than the room that a window has for a paragraph; for `train` already
                where the longest question that the recipe allows would not have it, as new questions may be longer.
        """
        questions, config = self._questions[split], self._config
        lengths = {"sequence_length": sequence_length, "doc_stride": config.doc_stride}
        if split == "train":
            room_for_paragraph(config.max_query_tokens, **lengths, num_special=2 + len(tokenizer.pair_ids))
        contexts = {
            text: EncodedContext.encode(text, tokenizer) for text in dict.fromkeys(q.context for q in questions)
        }
        windows: list[Window] = []
        targets: list[tuple[int, int]] = []
        num_cut = num_in_no_window = 0
        question_ids = tokenizer.encode_batch([question.text for question in questions])
        for index, (question, ids) in enumerate(zip(questions, question_ids, strict=True)):
            num_cut += len(ids) > config.max_query_tokens
            context = contexts[question.context]
            own = build_windows(index, ids[: config.max_query_tokens], context, tokenizer, **lengths)
            span = None
            if question.answers:
                text, start = question.answers[0]
                span = context.token_span(start, start + len(text))
            own_targets = [window.target(span) for window in own]
            num_in_no_window += span is not None and all(target == (0, 0) for target in own_targets)
            windows += own
            targets += own_targets
        notes = [f"{len(questions):,} questions are {len(windows):,} windows"]
        if num_cut:
            notes.append(f"cut {format_number_of(num_cut, 'question')} to `task.max_query_tokens`")
        if num_in_no_window:
            they_train = "it trains" if num_in_no_window == 1 else "they train"
            effect = f"; {they_train} as unanswerable" if split == "train" else ""
            answered = format_number_of(num_in_no_window, "question")
            notes.append(f"no window contains the whole answer to {answered}{effect}")
        return ScoredQuestions(
            tuple(window.token_ids for window in windows),
            np.array(targets, dtype=np.float64).reshape(-1, 2),
            tuple(window.answerable() for window in windows),
            notes=tuple(notes),
            questions=questions,
            windows=windows,
            contexts=contexts,
            max_answer_tokens=config.max_answer_tokens,
        )


@dataclass(frozen=True, kw_only=True)
class ScoredQuestions(EncodedSplit):
    """Windows of questions.

    Attributes:
        max_answer_tokens: Longest answer, `task.max_answer_tokens`.
        is_labelled: Every question has a list of gold answers, empty or not.
        threshold: No-answer score above which a question is left unanswered; None: the one that is best here.
    """

    questions: Sequence[SquadQuestion]
    windows: Sequence[Window]
    contexts: Mapping[str, EncodedContext]
    max_answer_tokens: int
    is_labelled: bool = True
    threshold: float | None = None
    _found: list[tuple[SeedOutputs, dict[str, Answered]]] = field(default_factory=list, init=False, compare=False)
    """The outputs searched last, and their answers."""

    def answer(self, outputs: SeedOutputs) -> dict[str, Answered]:
        """Return, by question id, the best answer under the seeds' mean logits and its no-answer score.

        The same outputs are searched once: their scores, files and probabilities are all made of these answers.
        """
        if not any(_are_same(outputs, searched) for searched, _ in self._found):
            self._found[:] = [(list(outputs), self._search(outputs))]
        return self._found[0][1]

    def _search(self, outputs: SeedOutputs) -> dict[str, Answered]:
        of_question: list[list[tuple[Window, FloatArray]]] = [[] for _ in self.questions]
        for window, *by_seed in zip(self.windows, *outputs, strict=True):
            of_question[window.question].append((window, np.mean(by_seed, axis=0, dtype=np.float64)))
        answered = {}
        for question, pairs in zip(self.questions, of_question, strict=True):
            context = self.contexts[question.context]
            text, score, null_score = best_answer(context, pairs, max_answer_tokens=self.max_answer_tokens)
            answered[question.id] = Answered(text, null_score - score, question.golds)
        return answered

    def score(self, outputs: SeedOutputs, is_scored_N: NDArray[np.bool_] | None = None) -> dict[str, float]:
        """Return exact match and F1 at the threshold or their best ones, at threshold 0, and separately for questions
        with and without an answer, as `squad_metrics` names them.
        """
        answered = list(self.answer(outputs).values())
        chosen = answered if is_scored_N is None else list(itertools.compress(answered, is_scored_N))
        return squad_metrics(chosen, self.threshold)

    def describe_outputs(self, outputs: SeedOutputs) -> list[str]:
        """Return a sentence if the threshold with the best F1 answers no question at all."""
        answered = list(self.answer(outputs).values())
        _, threshold = find_best_threshold(answered, [f1(one.text, one.golds) for one in answered])
        if any(one.no_answer_score <= threshold for one in answered):
            return []
        return ["no question is answered: F1 is best where all are left without an answer"]

    def prediction_columns(self, outputs: SeedOutputs) -> dict[str, list[str]]:
        """Return `answer`; `answer_margin`, its score minus the null score; `no_answer_probability`, the logistic
        function of the negative margin; gold `answers` as a JSON list. Several seeds add `no_answer_seed_spread` and
        `answer_seed_agreement`, the share of seeds whose own best answer is the same after normalisation.
        """
        answered = self.answer(outputs)
        columns = {
            "answer": [answer.text for answer in answered.values()],
            "answer_margin": [f"{answer.margin:.10g}" for answer in answered.values()],
            "no_answer_probability": [f"{value:.10g}" for value in _no_answer(answered)],
        }
        if self.is_labelled:
            golds = ([text for text, _ in question.answers] for question in self.questions)
            columns["answers"] = [json.dumps(texts, ensure_ascii=False) for texts in golds]
        if len(outputs) > 1:
            by_seed = [self._search([of_seed]) for of_seed in outputs]
            agreement = (
                np.mean([normalize_answer(of_seed[key].text) == normalize_answer(answer.text) for of_seed in by_seed])
                for key, answer in answered.items()
            )
            spread_N = np.std([_no_answer(of_seed) for of_seed in by_seed], axis=0, ddof=1)
            columns["no_answer_seed_spread"] = [f"{value:.10g}" for value in spread_N]
            columns["answer_seed_agreement"] = [f"{value:.10g}" for value in agreement]
        return columns

    def official_files(self, outputs: SeedOutputs) -> tuple[bytes, ...]:
        """Return what the official evaluation script reads: `{id: answer}`, and `{id: probability that there is no
        answer}`, its `--na-prob-file`. Every question gets its best answer; the script applies a threshold.
        """
        answered = self.answer(outputs)
        odds = dict(zip(answered, _no_answer(answered).tolist(), strict=True))
        return json_bytes({key: a.text for key, a in answered.items()}), json_bytes(odds)

    def write_answers(self, folder: Path, split: Split, outputs: SeedOutputs) -> None:
        """Write, by question id, what the official script reads: best answers and no-answer scores.

        `no-answer-<split>.json` holds `Answered.no_answer_score`, which orders questions as a probability would.
        """
        answered = self.answer(outputs)
        write_json(folder / f"predictions-{split}.json", {key: a.text for key, a in answered.items()})
        write_json(folder / f"no-answer-{split}.json", {key: a.no_answer_score for key, a in answered.items()})


def read_new_questions(task: TrainedTask, path: Path, columns: tuple[str, ...], progress: Progress) -> NewRows:
    """Read a file of the official layout; questions may lack `answers`.

    Raises:
        DataError: The file does not have that layout, or no question of it can be used.
    """
    del columns, progress
    assert isinstance(task.config, SquadTaskConfig)
    file = read_squad_json(path, needs_answers=False)
    if not file.questions:
        raise DataError(f"{path}: {file.skipped[0]}", "give a file with questions on its paragraphs")
    notes = []
    if file.skipped:
        left_out = format_number_of(len(file.skipped), "question")
        notes.append(f"left out {left_out} that cannot be used; the first: {file.skipped[0]}")
    threshold = task.no_answer_threshold
    if threshold is not None and math.isfinite(threshold):
        scored = "; scores are at this threshold" if file.has_answers else ""
        notes.append(
            "the run's own validation leaves questions unanswered above a no-answer probability of "
            f"{float(expit(threshold)):.4g}{scored}"
        )
    else:
        threshold = None
        notes += ["scores are at the thresholds that are best on this file"] if file.has_answers else []
    rows = new_questions(task.config, file.questions, has_answers=file.has_answers, threshold=threshold)
    cells = {"id": [q.id for q in file.questions], "question": [q.text for q in file.questions]}
    places = np.arange(len(file.questions))
    return replace(rows, columns=cells, readable=places, num_skipped=len(file.skipped), notes=tuple(notes))


def new_questions(
    config: SquadTaskConfig,
    questions: list[SquadQuestion],
    *,
    has_answers: bool = False,
    threshold: float | None = None,
) -> NewRows:
    """Return questions as rows to predict; `readable` are their rows, and there are no columns."""

    def encode(tokenizer: Tokenizer, sequence_length: int) -> ScoredQuestions:
        encoded = SquadTask(config, {"valid": questions}).encode("valid", tokenizer, sequence_length)
        return replace(encoded, is_labelled=has_answers, threshold=threshold)

    places = np.array([question.row for question in questions], dtype=np.int64)
    return NewRows(encode, [_key(question) for question in questions], {}, places)


def _are_same(outputs: SeedOutputs, others: SeedOutputs) -> bool:
    """Return whether both hold the very same arrays of each seed, which nothing writes into."""
    return len(outputs) == len(others) and all(one is other for one, other in zip(outputs, others, strict=True))


def _no_answer(answered: Mapping[str, Answered]) -> FloatArray:
    """Return the logistic function of each no-answer score."""
    return np.asarray(expit([answer.no_answer_score for answer in answered.values()]))


def _key(question: SquadQuestion) -> str:
    return f"{question.text}\0{question.context}"


def _read(place: Path | HubSource, progress: Progress) -> SquadFile:
    if isinstance(place, Path):
        return read_squad_json(place)
    with progress.bar("reading from the Hub", None) as bar:
        return read_squad_rows(str(place), counted(iter_hub_records(place, hint=LOCAL_HINT), bar))


def _file_notes(file: SquadFile, split: str, config: SquadTaskConfig) -> list[str]:
    notes = []
    if file.skipped:
        first = file.skipped[0]
        if config.on_invalid == "error" or not file.questions:
            hint = "`--set task.on_invalid=skip` leaves such questions out"
            if not file.questions:
                hint = "no question of the file can be used: correct it, or give another"
            raise DataError(f"{file.source}: {first}", hint)
        left_out = format_number_of(len(file.skipped), "question")
        notes.append(f"{split}: left out {left_out} that cannot be used; the first: {first}")
    num_questions = len(file.questions) + len(file.skipped)
    if num_questions != NUM_QUESTIONS[split]:
        found = f"{Path(file.source).name} has {format_number_of(num_questions, 'question')}"
        notes.append(f"{split}: {found}; the official file has {NUM_QUESTIONS[split]:,}")
    return notes


def _hold_out(
    file: SquadFile, titles: Sequence[str]
) -> tuple[list[SquadQuestion], list[SquadQuestion], tuple[str, ...]]:
    """Return the questions to train on, those of the held-out articles, and the titles of these articles."""
    known = list(dict.fromkeys(question.title for question in file.questions))
    for title in titles:
        if title not in known:
            close = difflib.get_close_matches(title, known, n=1)
            hint = f"did you mean `{close[0]}`?" if close else f"there are {_listed(known)}"
            raise DataError(f"{file.source}: no article `{title}` with questions to hold out", hint)
    held_out = tuple(titles) or tuple(known[-NUM_HELD_OUT_ARTICLES:])
    train = [question for question in file.questions if question.title not in held_out]
    if not train:
        raise DataError(
            f"{file.source}: all {len(known)} articles are held out to score on: none is left to train on",
            "give a validation file with `--set task.files.valid=FILE`, or fewer `task.valid_articles`",
        )
    return train, [question for question in file.questions if question.title in held_out], held_out


def _listed(titles: Sequence[str]) -> str:
    return name_some((f"`{title}`" for title in titles), limit=12)
