"""Predictions of a fine-tuned run for a file that it has not seen, in the layout of its task.

Axes: K seeds, N rows that can be read, C outputs.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from exlm_cli.config.tasks import RowTaskConfig
from exlm_cli.data import BoolArray
from exlm_cli.data.rows.records import COMPRESSIONS, FORMATS
from exlm_cli.errors import ConfigError
from exlm_cli.files import folder_for_results, write_together
from exlm_cli.finetune.calibration import (
    DEFAULT_LEVEL,
    MIN_OF_EACH,
    MIN_SCALED_ROWS,
    CalibratedRows,
    Calibration,
    ConformalResiduals,
    check_level,
    error_signs,
    read_calibration,
)
from exlm_cli.finetune.model import Finetuned
from exlm_cli.finetune.results import RunResults
from exlm_cli.finetune.training_rows import read_training_rows
from exlm_cli.format import format_number_of, name_some
from exlm_cli.progress import Progress
from exlm_cli.tasks.base import (
    EncodedSplit,
    FloatArray,
    PredictionSummary,
    SeedOutputs,
    TrainedTask,
)
from exlm_cli.tasks.metrics import probabilities_by_seed
from exlm_cli.tasks.registry import layout_of
from exlm_cli.tasks.rows.task import name_columns


def predict(
    finetuned: Finetuned,
    path: Path,
    out: Path | None,
    *,
    folder: Path,
    column: str | None = None,
    interval_level: float = DEFAULT_LEVEL,
    draw: Callable[[CalibratedRows, Path], Mapping[Path, bytes]] | None = None,
    progress: Progress,
) -> PredictionSummary:
    """Predict the rows or questions of a file, write them, and score them where the file has labels.

    The columns of the layout are followed by `<name>_calibrated` probabilities (for spans those of
    `AnswerProbabilities`) or, for values, the interval `<name>_low_90`, `<name>_high_90` at `interval_level`; then by
    `in_split`, which is `train`, `valid` or `none`, and for molecules `nearest_train_tanimoto`.

    Args:
        path: The file, in the layout of the run's task.
        out: File of predictions; None: `predictions-<name of the file>` in `folder`.
        folder: Folder of the predictions without `out`.
        column: Column of the SMILES or text, for a task that has one; None: the usual one.
        interval_level: Share of the true values that intervals should hold, between 0 and 1.
        draw: Returns figures of the rows, given these and the file of predictions, to be written with the others. It is
            called if the file has labels and the run a calibration.

    Raises:
        ConfigError: A column that the task does not use, a name of another format, the input file as output, or a level
            out of bounds or for a run that predicts no values.
        DataError: The file cannot be read.
        CheckpointError: A file cannot be written, and none is; or a file of the run is missing or altered.
    """
    config, results = finetuned.recipe.task, finetuned.results
    if column is not None and not isinstance(config, RowTaskConfig):
        raise ConfigError(f"{config.name} finds its own columns; `{column}` is given", "leave the column out")
    check_level(interval_level, results.loss, finetuned.run)
    layout = layout_of(config)
    out = out or folder / f"predictions-{_stem(path)}{layout.suffix}"
    if out.suffix.lower() != layout.suffix:
        raise ConfigError(f"`out={out}`: predictions of {config.name} are a {layout.suffix} file", "give another name")
    files = layout.output_files(out)
    refuse_overwriting(path, *files)
    with folder_for_results(out.parent, *files):
        calibration, known = read_calibration(finetuned.run), read_training_rows(finetuned.run)
        task = TrainedTask(config, results.input_kind, results.loss, results.output_names, results.no_answer_threshold)
        rows = layout.read(task, path, column, progress)
        encoded = rows.encode(finetuned.tokenizer, finetuned.sequence_length)
        outputs = finetuned.run_seeds(encoded, progress)
        split_N = known.splits_of(rows.keys)
        nearest_N = known.nearest_tanimoto(rows.keys, progress) if results.input_kind == "smiles" else None
        added: dict[str, list[str]] = {}
        labelled: CalibratedRows | None = None
        notes: list[str] = []
        if calibration.outputs:
            calibrated = _calibrated_rows(results, encoded, outputs, nearest_N, calibration, interval_level)
            added, notes = _calibrated_columns(calibrated)
            labelled = calibrated if encoded.is_labelled else None
        added["in_split"] = split_N.tolist()
        if nearest_N is not None:
            added["nearest_train_tanimoto"] = [f"{value:.4f}" for value in nearest_N]
        table, notes_on_table = rows.as_csv(encoded.prediction_columns(outputs) | added)
        contents = dict(zip(files, (*encoded.official_files(outputs), table), strict=True))
        if draw is not None and labelled is not None:
            contents |= draw(labelled, out)
        scores, of_new = _score(encoded, outputs, labelled, split_N == "none")
        write_together(contents)
    counts, names = Counter(split_N.tolist()), {"train": "training", "valid": "validation"}
    counted = [f"of the {n} split: {counts[s]:,} of {len(split_N):,}" for s, n in names.items() if counts[s]]
    if counted:
        scored = "; scored with and without them" if of_new else ""
        notes.append(f"rows {', '.join(counted)}{scored}")
    notes += _describe_splits(finetuned)
    return PredictionSummary(
        tuple(contents),
        num_rows=rows.num_rows,
        num_unreadable=rows.num_rows - len(rows.keys),
        metrics=scores,
        notes=(*encoded.notes, *rows.notes, *notes_on_table, *notes),
        num_in_training=counts["train"],
        num_in_validation=counts["valid"],
        metrics_of_new=of_new,
        labels=encoded.score_labels(outputs) if scores else {},
    )


def _score(
    encoded: EncodedSplit, outputs: SeedOutputs, labelled: CalibratedRows | None, is_new_N: BoolArray
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the scores of all rows and, if some but not all of them are new, those of the new ones."""
    if not encoded.is_labelled:
        return {}, {}
    scores, of_new = encoded.score(outputs), {}
    if is_new_N.any() and not is_new_N.all():
        of_new = encoded.score(outputs, is_new_N)
        of_new = {} if all(map(math.isnan, of_new.values())) else of_new
    if labelled is not None:
        scores |= labelled.score()
    if labelled is not None and of_new:
        of_new |= labelled.only(is_new_N).score()
    return scores, of_new


def _describe_splits(finetuned: Finetuned) -> list[str]:
    """Return a note on which split of a run of several made the predictions."""
    results, replication = finetuned.results, finetuned.results.replication
    if replication is None:
        return []
    first, *others = replication.split_seeds
    seeds = format_number_of(len(results.seeds), "seed")
    where = name_some(str(finetuned.run / "replicates" / f"split-{seed}") for seed in others)
    return [
        f"predictions are the mean of {seeds} on the first of {len(replication.split_seeds)} splits (`task.split_seed` "
        f"{first}); the other splits are runs of their own: {where}"
    ]


def _calibrated_rows(
    results: RunResults,
    encoded: EncodedSplit,
    outputs: SeedOutputs,
    nearest_N: FloatArray | None,
    calibration: Calibration,
    level: float,
) -> CalibratedRows:
    """Return the mean prediction of the seeds with its calibration; targets are NaN where the file has none."""
    if results.loss == "span":
        found = encoded.answer_probabilities(outputs)
        assert found is not None, "a run with a calibration has them"
        return CalibratedRows("binary", found.names, found.values, found.targets, calibration, level)
    names = results.output_names
    by_seed_KNC = probabilities_by_seed(results.loss, outputs, len(names))
    signs = error_signs(by_seed_KNC, nearest_N)
    return CalibratedRows(results.loss, names, by_seed_KNC.mean(axis=0), encoded.targets, calibration, level, signs)


def _calibrated_columns(rows: CalibratedRows) -> tuple[dict[str, list[str]], list[str]]:
    """Return columns of intervals or calibrated probabilities, and notes on outputs that have none, or plain ones."""
    loss, names, mean_NC, calibration = rows.loss, rows.names, rows.mean, rows.calibration
    equal: list[str] = []
    if loss == "regression":
        half_NC, percent = rows.half_widths, f"{100 * rows.level:g}"
        has_C = np.array(calibration.has_intervals(rows.level))
        values = {f"low_{percent}": mean_NC - half_NC, f"high_{percent}": mean_NC + half_NC}
        equal = [
            f"`{name}`"
            for name, has, output in zip(names, has_C, calibration.outputs, strict=True)
            if has and isinstance(output, ConformalResiduals) and len(output.residuals) < MIN_SCALED_ROWS
        ]
        what = f"too few validation rows for intervals of {percent} %:"
    else:
        values = {"calibrated": rows.calibrated}
        has_C = np.array([output is not None for output in calibration.outputs])
        what = (
            f"no calibrated probabilities: fewer than {MIN_OF_EACH} positive or {MIN_OF_EACH} negative validation rows:"
        )
    missing = name_some(f"`{name}`" for name, has in zip(names, has_C, strict=True) if not has)
    notes = [f"{what} {missing}"] if missing else []
    if equal:
        few = f"fewer than {MIN_SCALED_ROWS} validation rows"
        notes.append(f"intervals are equally wide for all rows: {few}: {name_some(equal)}")
    if loss == "classes" and missing:
        return {}, notes
    named = [name for name, has in zip(names, has_C, strict=True) if has]
    columns = [name_columns(named, end, values_NC[:, has_C]) for end, values_NC in values.items()]
    return {name: cells for of_end in columns for name, cells in of_end.items()}, notes


def refuse_overwriting(data: Path, *written: Path) -> None:
    """Refuse to overwrite the input file.

    Raises:
        ConfigError: One of `written` is `data`.
    """
    for path in written:
        if data.exists() and path.exists() and path.samefile(data):
            raise ConfigError(f"`out={written[0]}` would overwrite the input file {data}", "name another file")


def _stem(path: Path) -> str:
    """Return `dev-v2.0` of `dev-v2.0.json.gz`."""
    while path.suffix.lower() in (*COMPRESSIONS, *FORMATS):
        path = path.with_suffix("")
    return path.name
