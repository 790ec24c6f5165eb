"""A model of a GLUE task applied to a file of its layout: the table that the benchmark's server takes."""

import math
from pathlib import Path

from exlm_cli.errors import DataError
from exlm_cli.files import write_atomically
from exlm_cli.progress import Progress
from exlm_cli.tasks.applied import Applied, FinetunedModels, describe_cut, probabilities_by_seed
from exlm_cli.tasks.base import FloatArray
from exlm_cli.tasks.glue import GlueTask, read_glue_file
from exlm_cli.tasks.glue_tasks import GLUE_TASKS, HIGHEST_SIMILARITY, GlueTaskInfo


def apply_to_glue_file(finetuned: FinetunedModels, path: Path, written: Path, *, progress: Progress) -> Applied:
    """Write `index` and `prediction` of every row, tab-separated, and score the rows if all of them have labels.

    Classes are written as the official files have them: by number for QQP, SST-2, CoLA and MRPC, else by name.

    Args:
        finetuned: Of a GLUE task.
        path: In any layout that the task is read from, labels optional.
        written: The table.
        progress: Who is told.

    Raises:
        DataError: The file or a row of it cannot be read; every row has to have its prediction.
        CheckpointError: The file system refuses.
    """
    info = GLUE_TASKS[finetuned.results.task.partition("/")[2]]
    file = read_glue_file(info, path, progress, needs_labels=False)
    if file.problems:
        raise DataError(file.problems[0], "every row of the file needs a prediction: mend the row or take it out")
    task = GlueTask(info, {"valid": file.examples}, 0)
    encoded = task.encode("valid", finetuned.tokenizer, finetuned.sequence_length)
    mean = probabilities_by_seed(finetuned, encoded, progress).mean(axis=0)
    lines = ["index\tprediction", *(f"{i}\t{_answer(info, row)}" for i, row in zip(file.indices, mean, strict=True))]
    write_atomically(written, ("\n".join(lines) + "\n").encode())
    num_unlabelled = sum(math.isnan(example.target) for example in file.examples)
    notes = describe_cut(task.num_cut.get("valid", 0), finetuned.sequence_length)
    if 0 < num_unlabelled < file.num_rows:
        notes += (f"not scored: {num_unlabelled:,} of {file.num_rows:,} rows have no label",)
    metrics = {} if num_unlabelled else task.score("valid", list(mean))
    return Applied((written,), file.num_rows, 0, metrics, notes)


def _answer(info: GlueTaskInfo, outputs_C: FloatArray) -> str:
    if not info.classes:
        return f"{min(max(float(outputs_C[0]), 0.0), HIGHEST_SIMILARITY):.6f}"
    best = int(outputs_C.argmax())
    return str(best) if info.has_numbered_classes else info.classes[best]
