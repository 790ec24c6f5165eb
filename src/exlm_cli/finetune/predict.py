"""Predictions of a fine-tuned run, or of several, for a file that they have not seen, in the layout of their task.

Axes: K seeds of all runs, N rows that can be read, C outputs.
"""

import math
from collections import Counter
from collections.abc import Sequence
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
    fit_calibration,
    read_calibration,
)
from exlm_cli.finetune.model import Finetuned
from exlm_cli.finetune.results import RunResults, read_split_outputs
from exlm_cli.finetune.training_rows import read_training_rows
from exlm_cli.format import name_some
from exlm_cli.progress import Progress
from exlm_cli.tasks.base import (
    EncodedSplit,
    FloatArray,
    NewRows,
    PredictionSummary,
    SeedOutputs,
    TrainedTask,
)
from exlm_cli.tasks.metrics import probabilities_by_seed
from exlm_cli.tasks.registry import layout_of
from exlm_cli.tasks.rows.encoded import name_columns


def predict(
    finetuned: Finetuned,
    path: Path,
    out: Path | None,
    *,
    folder: Path,
    column: str | None = None,
    ensemble: Sequence[Finetuned] = (),
    interval_level: float = DEFAULT_LEVEL,
    escape_formulas: bool = False,
    progress: Progress,
) -> tuple[PredictionSummary, CalibratedRows | None]:
    """Predict the rows or questions of a file, write them, and score them where the file has labels.

    The columns of the layout are followed by `<name>_calibrated` probabilities (for spans those of
    `AnswerProbabilities`) or, for values, the interval `<name>_low_90`, `<name>_high_90` at `interval_level`; then by
    `in_split`, which is `train`, `valid` or `none`, and for molecules `nearest_train_tanimoto`.

    Args:
        path: The file, in the layout of the run's task.
        out: File of predictions; None: `predictions-<name of the file>` in `folder`.
        folder: Folder of the predictions without `out`.
        column: Column of the SMILES or text, for a task that has one; None: the usual one.
        ensemble: Further runs of the same task; the mean is over the seeds of all runs.
        interval_level: Share of the true values that intervals should hold, between 0 and 1.
        escape_formulas: Put an apostrophe before a cell that a spreadsheet would take for a formula.

    Returns:
        What was written, and the labelled rows for figures; None where the file has no labels or the runs no
        calibration.

    Raises:
        ConfigError: A column that the task does not use, a name of another format, the input file as output, a level
            out of bounds or for a run that predicts no values, or runs of different tasks.
        DataError: The file cannot be read.
        CheckpointError: A file cannot be written, or a file of a run is missing or altered.
    """
    config, results, members = finetuned.recipe.task, finetuned.results, (finetuned, *ensemble)
    if column is not None and not isinstance(config, RowTaskConfig):
        raise ConfigError(f"{config.name} finds its own columns; `{column}` is given", "leave the column out")
    check_level(interval_level, results.loss, finetuned.run)
    for other in ensemble:
        _refuse_other_task(finetuned, other)
    layout = layout_of(config)
    out = out or folder / f"predictions-{_stem(path)}{layout.suffix}"
    if out.suffix.lower() != layout.suffix:
        raise ConfigError(f"`out={out}`: predictions of {config.name} are a {layout.suffix} file", "give another name")
    files = layout.output_files(out)
    refuse_overwriting(path, *files)
    with folder_for_results(out.parent, *files):
        calibration, notes = _calibration_of(members)
        known = read_training_rows([member.run for member in members])
        threshold = None if ensemble else results.no_answer_threshold
        task = TrainedTask(config, results.input_kind, results.loss, results.output_names, threshold)
        rows = layout.read(task, path, column, progress)
        encoded, outputs, notes_on_encoding = _run_models(members, rows, progress)
        split_N = known.splits_of(rows.keys)
        nearest_N = known.nearest_tanimoto(rows.keys, progress) if results.input_kind == "smiles" else None
        added: dict[str, list[str]] = {}
        labelled = None
        if calibration is not None:
            calibrated = _calibrated_rows(results, encoded, outputs, nearest_N, calibration, interval_level)
            added, missing = _calibrated_columns(calibrated)
            notes += missing
            labelled = calibrated if encoded.is_labelled else None
        added["in_split"] = split_N.tolist()
        if nearest_N is not None:
            added["nearest_train_tanimoto"] = [f"{value:.4f}" for value in nearest_N]
        predicted = encoded.prediction_columns(outputs) | added
        notes_on_table = rows.write(predicted, files[-1], escapes_formulas=escape_formulas)
        official = encoded.official_files(outputs)
        write_together(dict(zip(files[: len(official)], official, strict=True)))
        scores, of_new = _score(encoded, outputs, labelled, split_N == "none")
    counts, names = Counter(split_N.tolist()), {"train": "training", "valid": "validation"}
    counted = [f"of the {n} split: {counts[s]:,} of {len(split_N):,}" for s, n in names.items() if counts[s]]
    if counted:
        scored = "; scored with and without them" if of_new else ""
        notes.append(f"rows {', '.join(counted)}{scored}")
    notes += _describe_splits_left(members)
    summary = PredictionSummary(
        files,
        num_rows=rows.num_rows,
        num_unreadable=rows.num_rows - len(rows.keys),
        metrics=scores,
        notes=(*notes_on_encoding, *rows.notes, *notes_on_table, *notes),
        num_in_training=counts["train"],
        num_in_validation=counts["valid"],
        metrics_of_new=of_new,
        labels=encoded.score_labels(outputs) if scores else {},
    )
    return summary, labelled


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


def _describe_splits_left(members: Sequence[Finetuned]) -> list[str]:
    """Return a note for each run of several splits whose other splits are there, but are not all given."""
    given = {member.run.resolve() for member in members}
    notes = []
    for member in members:
        seeds = () if member.results.replication is None else member.results.replication.split_seeds
        others = [member.run / "replicates" / f"split-{seed}" for seed in seeds[1:]]
        left = [run.name for run in others if run.is_dir() and run.resolve() not in given]
        if left:
            what = f"predicted without {len(left)} of the {len(seeds)} splits of {member.run}"
            notes.append(f"{what}; `ensemble` adds them: {name_some(left)} of {others[0].parent}")
    return notes


def _refuse_other_task(first: Finetuned, other: Finetuned) -> None:
    """Refuse runs whose outputs cannot be averaged; for spans, tokens and windows must be the same as well."""
    one, two = first.results, other.results
    compared: dict[str, tuple[object, object]] = {
        "task": (one.task, two.task),
        "kind of labels": (one.loss, two.loss),
        "labels": (", ".join(one.output_names), ", ".join(two.output_names)),
        "input": (one.input_kind, two.input_kind),
        "`task.canonical_smiles`": (first.recipe.task.has_canonical_smiles, other.recipe.task.has_canonical_smiles),
        "`task.standardise: parent`": (first.recipe.task.reads_parents, other.recipe.task.reads_parents),
    }
    if one.loss == "span":
        compared["tokenizer"] = (first.tokenizer.fingerprint, other.tokenizer.fingerprint)
        for key in ("max_query_tokens", "doc_stride", "max_answer_tokens"):
            compared[f"`task.{key}`"] = (getattr(first.recipe.task, key), getattr(other.recipe.task, key))
        compared["`task.sequence_length`"] = (first.sequence_length, other.sequence_length)
    for what, (own, theirs) in compared.items():
        if own != theirs:
            raise ConfigError(
                f"{other.run} cannot be averaged with {first.run}: {what} {theirs}, not {own}",
                "the runs of an ensemble are fine-tuned on one task",
            )


def _run_models(
    members: Sequence[Finetuned], rows: NewRows, progress: Progress
) -> tuple[EncodedSplit, list[list[FloatArray]], tuple[str, ...]]:
    """Return the encoded rows, the outputs of every seed of every run, and notes on the encoding."""
    outputs: list[list[FloatArray]] = []
    notes: dict[str, None] = {}
    for member in members:
        encoded = rows.encode(member.tokenizer, member.sequence_length)
        notes |= dict.fromkeys(encoded.notes)
        outputs += member.run_seeds(encoded, progress)
    return encoded, outputs, tuple(notes)


def _calibration_of(members: Sequence[Finetuned]) -> tuple[Calibration | None, list[str]]:
    """Return the calibration of a run, or of the mean of several that have the same validation rows; or a note."""
    first, *others = members
    if not others:
        calibration = read_calibration(first.run)
        return calibration if calibration.outputs else None, []
    if first.results.loss == "span":
        return None, ["no calibrated probabilities: answers of several runs together are not calibrated"]
    for member in members:
        if not (member.run / "targets-valid.csv").exists():
            what = f"{member.run} has no predictions for its validation rows, which `exlm push` leaves out"
            return None, [f"neither calibrated probabilities nor intervals: {what}"]
    found = [read_split_outputs(member.run, member.results, "valid") for member in members]
    _, _, targets_NC = found[0]
    same_rows = {member.results.split_sha256 for member in members} == {first.results.split_sha256}
    if not same_rows or not all(np.array_equal(targets_NC, of_run, equal_nan=True) for _, _, of_run in found):
        return None, ["neither calibrated probabilities nor intervals: the runs have different validation rows"]
    by_seed_KNC = np.concatenate([of_run for _, of_run, _ in found])
    nearest = [read_calibration(member.run).similarity_of("valid", len(targets_NC)) for member in members]
    known = [nearest_N for nearest_N in nearest if nearest_N is not None]
    nearest_N = np.max(known, axis=0) if len(known) == len(members) else None
    return fit_calibration(first.results.loss, by_seed_KNC, targets_NC, nearest_N), []


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
