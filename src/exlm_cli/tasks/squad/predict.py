"""A model of SQuAD 2.0 applied to a file of the official layout: answers, and how likely there is none."""

import math
from pathlib import Path

from scipy.special import expit

from exlm_cli.config.tasks import SquadTaskConfig
from exlm_cli.errors import DataError
from exlm_cli.files import write_json
from exlm_cli.progress import Progress
from exlm_cli.tasks.applied import Applied, FinetunedModels, mean_span_logits, no_answer_file
from exlm_cli.tasks.squad.files import read_squad_json
from exlm_cli.tasks.squad.task import SquadTask


def apply_to_squad_file(finetuned: FinetunedModels, path: Path, written: Path, *, progress: Progress) -> Applied:
    """Write what the official evaluation script reads: `{id: answer}`, and beside it `<name>-no-answer.json` with the
    probability that there is no answer, its `--na-prob-file`. Score them if all questions have their answers.

    Every question has its best answer in the file, never mind how likely there is none: the script, or whoever reads
    both files, applies a threshold. The seeds' logits are averaged.

    Args:
        finetuned: Of SQuAD.
        path: The official JSON; `answers` may be missing.
        written: Where the answers go.
        progress: Who is told.

    Raises:
        DataError: The file is not of that layout, or no question of it can be used.
        ConfigError: `task.doc_stride` is too large for a question.
        CheckpointError: The file system refuses.
    """
    file = read_squad_json(path, needs_answers=False)
    if not file.questions:
        raise DataError(f"{path}: {file.problems[0]}")
    config = finetuned.recipe.task
    assert isinstance(config, SquadTaskConfig)
    task = SquadTask(config, {"valid": file.questions})
    encoded = task.encode("valid", finetuned.tokenizer, finetuned.sequence_length)
    logits = mean_span_logits(finetuned, encoded, progress)
    answers, no_answer_scores = task.official_predictions("valid", logits)
    odds_file = no_answer_file(written)
    # the odds first: answers whose file is there are complete
    write_json(odds_file, {key: float(expit(score)) for key, score in no_answer_scores.items()})
    write_json(written, answers)
    notes = [note.removeprefix("valid: ") for note in task.notes]
    if file.problems:
        notes.append(f"left out {len(file.problems):,} questions that cannot be used; the first: {file.problems[0]}")
    notes += _describe_threshold(finetuned.results.validation_median("f1_threshold"))
    metrics = task.score("valid", logits) if file.has_answers else {}
    return Applied(
        (written, odds_file), len(file.questions) + len(file.problems), len(file.problems), metrics, tuple(notes)
    )


def _describe_threshold(log_odds: float | None) -> list[str]:
    """Say above which probability the run itself left questions unanswered."""
    if log_odds is None or math.isinf(log_odds):
        return []
    threshold = float(expit(log_odds))
    return [f"the run's own validation leaves questions unanswered above a no-answer probability of {threshold:.4g}"]
