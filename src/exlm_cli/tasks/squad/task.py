"""SQuAD 2.0: questions on paragraphs, answered with a piece of the paragraph or with nothing."""

import difflib
import hashlib
from collections.abc import Sequence
from typing import Literal, final

import numpy as np

from exlm_cli.config.spelling import how_to_set
from exlm_cli.config.tasks import SquadTaskConfig
from exlm_cli.data.masking import IntArray
from exlm_cli.data.rows.hub import iter_hub_records
from exlm_cli.data.rows.records import SkippedRow
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.errors import DataError
from exlm_cli.progress import Progress
from exlm_cli.tasks.base import EncodedSplit, FloatArray, Loss, Split
from exlm_cli.tasks.squad.files import SquadFile, SquadQuestion, read_squad_json, read_squad_rows
from exlm_cli.tasks.squad.metric import Answered, squad_metrics
from exlm_cli.tasks.squad.windows import EncodedContext, Window, build_windows, n_best_answers
from exlm_cli.tasks.task_files import (
    LOCAL_HINT,
    choose_rows,
    counted,
    existing_folder,
    find_file,
    given_file,
    hub_source,
)

NAME = "squad/v2"
HUB_NAME = "rajpurkar/squad_v2"
NUM_HELD_OUT_ARTICLES = 2

_N_BEST = 20
_FOLDERS = ("SQuAD", "squad", "squad2", "squad-v2")
_SUFFIXES = (".json",)
_PROTOCOL_NOTE = (
    "SQuAD 2.0 has no public test answers: `valid` is what the paper reports; best epoch and no-answer threshold "
    "are chosen on `valid` too"
)


def load_squad(config: SquadTaskConfig, progress: Progress) -> "SquadTask":
    """Read the questions to train and to score on.

    They are `task.files`, else `train-v2.0*.json` and `dev-v2.0*.json` in `task.data_dir`, else the Hub's. Without a
    file to score on, the articles `task.valid_articles` are held out of the training file, or its last two.

    Raises:
        DataError: A file is missing or malformed, a question cannot be used while `task.on_invalid` is `error`, or an
            article to hold out is not there.
    """
    train_file, valid_file = _read_files(config, progress)
    held_out: tuple[str, ...] = ()
    notes = [_PROTOCOL_NOTE]
    for split, file in (("train", train_file), ("valid", valid_file)):
        if file is not None:
            notes += _problem_notes(file, split, config.on_invalid)
    if valid_file is not None:
        if config.valid_articles:
            raise DataError(
                f"`task.valid_articles` holds articles out, but there is {valid_file.source} to score on",
                f"leave it out, or name the training file alone with {how_to_set('task.files.train', 'FILE')}",
            )
        train, valid = train_file.questions, valid_file.questions
    else:
        train, valid, held_out = _hold_out(train_file, config.valid_articles)
        notes.append(
            f"scored on questions about {_listed(held_out)}, held out of {train_file.source}: no official "
            "development set, so not the paper's numbers"
        )
    chosen = choose_rows(len(train), config)
    if len(chosen) < len(train):
        notes.append(f"trained on {len(chosen):,} of {len(train):,} questions (`task.max_rows`)")
        train = [train[index] for index in chosen]
    for split, questions in (("train", train), ("valid", valid)):
        num_without = sum(not question.answers for question in questions)
        notes.append(f"{split}: {num_without:,} of {len(questions):,} questions have no answer")
    left_out = [row for file in (train_file, valid_file) if file is not None for row in file.left_out]
    return SquadTask(config, {"train": train, "valid": valid}, notes, held_out=held_out, left_out=left_out)


def _read_files(config: SquadTaskConfig, progress: Progress) -> tuple[SquadFile, SquadFile | None]:
    files = config.files
    if files.train is not None:
        valid = None if files.valid is None else read_squad_json(given_file(config, files.valid))
        return read_squad_json(given_file(config, files.train)), valid
    train_source = hub_source(config, HUB_NAME, None, "train")
    valid_source = hub_source(config, HUB_NAME, None, "validation")
    if train_source is not None and valid_source is not None:
        with progress.bar("reading from the Hub", None) as bar:
            train, valid = (
                read_squad_rows(
                    str(source), (r.values for r in counted(iter_hub_records(source, hint=LOCAL_HINT), bar))
                )
                for source in (train_source, valid_source)
            )
        return train, valid
    folder = existing_folder(config, _FOLDERS)
    train_path = find_file(folder, "train-v2.0*", _SUFFIXES)
    if train_path is None:
        raise DataError(
            f"{folder}: no file `train-v2.0*.json`, also with .gz or .xz",
            f"name it with {how_to_set('task.files.train', 'FILE')}",
        )
    valid_path = find_file(folder, "dev-v2.0*", _SUFFIXES)
    return read_squad_json(train_path), None if valid_path is None else read_squad_json(valid_path)


def _problem_notes(file: SquadFile, split: str, on_invalid: Literal["error", "skip"]) -> list[str]:
    if not file.problems:
        return []
    if on_invalid == "error" or not file.questions:
        raise DataError(
            f"{file.source}: {file.problems[0]}", f"{how_to_set('task.on_invalid', 'skip')} leaves such questions out"
        )
    return [f"{split}: left out {len(file.problems):,} questions that cannot be used; the first: {file.problems[0]}"]


def _hold_out(
    file: SquadFile, titles: Sequence[str]
) -> tuple[list[SquadQuestion], list[SquadQuestion], tuple[str, ...]]:
    """Return the questions to train on, those of the held-out articles, and the titles of these."""
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
            f"{file.source}: {len(known)} articles with questions that can be used, all of them held out to score on: "
            "none is left to train on",
            f"give a validation file with {how_to_set('task.files.valid', 'FILE')}, or fewer `task.valid_articles`",
        )
    return train, [question for question in file.questions if question.title in held_out], held_out


def _listed(titles: Sequence[str]) -> str:
    shown = ", ".join(f"`{title}`" for title in titles[:12])
    return f"{shown} and {len(titles) - 12} more" if len(titles) > 12 else shown


@final
class SquadTask:
    """A `DownstreamTask`: one example for each window, one score for each question."""

    name = NAME
    input_kind: Literal["text", "smiles"] = "text"
    loss: Loss = "span"
    output_names = ("start", "end")
    selection_metric = "f1"
    is_greater_better = True
    class_weights: FloatArray | None = None
    splits: tuple[Split, ...] = ("train", "valid")

    def __init__(
        self,
        config: SquadTaskConfig,
        questions: dict[Split, list[SquadQuestion]],
        notes: Sequence[str] = (),
        *,
        held_out: tuple[str, ...] = (),
        left_out: Sequence[SkippedRow] = (),
    ) -> None:
        """Hold what was read; `held_out` are the articles of the training file that `valid` is about, if it is."""
        self.held_out = held_out
        self._config = config
        self._questions = questions
        self._notes = tuple(notes)
        self.left_out = tuple(left_out)
        self._encoding_notes: dict[Split, tuple[str, ...]] = {}
        self._windows: dict[Split, list[Window]] = {}
        self._contexts: dict[Split, dict[str, EncodedContext]] = {}

    @property
    def split_name(self) -> str:
        """`official`, `files` of the user's, or which articles are held out of the training file."""
        if self.held_out:
            return f"held out: {', '.join(self.held_out)}"
        return "official" if self._config.files.valid is None else "files"

    @property
    def split_sizes(self) -> dict[str, int]:
        """Questions of each split."""
        return {split: len(self._questions[split]) for split in self.splits}

    @property
    def split_indices(self) -> dict[str, IntArray]:
        """Question of the file each question came from, counted from 0."""
        return {split: np.array([q.row for q in self._questions[split]], dtype=np.int64) for split in self.splits}

    @property
    def notes(self) -> tuple[str, ...]:
        """What a report has to say; once a split is encoded, also what was cut."""
        return self._notes + tuple(note for split in self.splits for note in self._encoding_notes.get(split, ()))

    @property
    def score_fingerprint(self) -> str:
        """SHA-256 of the longest answer allowed, and of the id, paragraph and all gold answers of each question."""
        digest = hashlib.sha256(str(self._config.max_answer_tokens).encode())
        for question in self._questions["valid"]:
            digest.update(repr((question.id, question.context, question.answers)).encode())
        return digest.hexdigest()

    def encode(self, split: Split, tokenizer: Tokenizer, sequence_length: int) -> EncodedSplit:
        """Cut a split into windows; a target is the first gold answer.

        Raises:
            ConfigError: `task.doc_stride` is more than the room that a window has for a paragraph.
        """
        questions = self._questions[split]
        contexts = {
            text: EncodedContext.encode(text, tokenizer) for text in dict.fromkeys(q.context for q in questions)
        }
        windows: list[Window] = []
        targets: list[tuple[int, int]] = []
        num_cut = num_unheld = 0
        question_ids = tokenizer.encode_batch([question.text for question in questions])
        for index, (question, ids) in enumerate(zip(questions, question_ids, strict=True)):
            num_cut += len(ids) > self._config.max_query_tokens
            context = contexts[question.context]
            own = build_windows(
                index,
                ids[: self._config.max_query_tokens],
                context,
                tokenizer,
                sequence_length=sequence_length,
                doc_stride=self._config.doc_stride,
            )
            span = None
            if question.answers:
                text, start = question.answers[0]
                span = context.token_span(start, start + len(text))
            own_targets = [window.target(span) for window in own]
            num_unheld += span is not None and all(target == (0, 0) for target in own_targets)
            windows += own
            targets += own_targets
        self._windows[split], self._contexts[split] = windows, contexts
        self._encoding_notes[split] = tuple(_encoding_notes(split, len(questions), len(windows), num_cut, num_unheld))
        return EncodedSplit(
            tuple(window.token_ids for window in windows),
            np.array(targets, dtype=np.float64).reshape(-1, 2),
            tuple(window.answerable() for window in windows),
        )

    def answer(self, split: Split, outputs: Sequence[FloatArray]) -> list[Answered]:
        """Return the best answer to each question of a split, and how much more the model believes that there is none.

        Args:
            split: Encoded before.
            outputs: (L, 2) logits of each window, in order.
        """
        questions, contexts = self._questions[split], self._contexts[split]
        of_question: list[list[tuple[Window, FloatArray]]] = [[] for _ in questions]
        for window, logits in zip(self._windows[split], outputs, strict=True):
            of_question[window.question].append((window, logits))
        answered = []
        for question, pairs in zip(questions, of_question, strict=True):
            answers, null_score = n_best_answers(
                contexts[question.context],
                pairs,
                n_best=_N_BEST,
                max_answer_tokens=self._config.max_answer_tokens,
            )
            text, score = (answers[0].text, answers[0].score) if answers else ("", -np.inf)
            answered.append(Answered(text, null_score - score, question.golds))
        return answered

    def official_predictions(
        self, split: Split, outputs: Sequence[FloatArray]
    ) -> tuple[dict[str, str], dict[str, float]]:
        """Return by question id what the official script reads: best answers, and how likely there is none.

        Arguments are those of `answer`; the second one is `Answered.no_answer_score`, which orders questions as a
        probability would.
        """
        answered = dict(zip((q.id for q in self._questions[split]), self.answer(split, outputs), strict=True))
        return {key: a.text for key, a in answered.items()}, {key: a.no_answer_score for key, a in answered.items()}

    def score(self, split: Split, outputs: Sequence[FloatArray]) -> dict[str, float]:
        """Return exact match and F1 at their best thresholds, at threshold 0, and apart for questions with and without
        an answer, as `squad_metrics` names them.

        Args:
            split: Encoded before.
            outputs: (L, 2) logits of each window, in order.
        """
        return squad_metrics(self.answer(split, outputs))


def _encoding_notes(split: Split, num_questions: int, num_windows: int, num_cut: int, num_unheld: int) -> list[str]:
    notes = [f"{split}: {num_questions:,} questions are {num_windows:,} windows"]
    if num_cut:
        notes.append(f"{split}: cut {num_cut:,} questions to `task.max_query_tokens`")
    if num_unheld:
        as_what = "; they train as unanswerable" if split == "train" else ""
        notes.append(f"{split}: the answer to {num_unheld:,} questions is whole in no window{as_what}")
    return notes
