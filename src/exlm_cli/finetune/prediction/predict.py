"""Predictions of a fine-tuned run for rows that it has not seen, of a file or in memory: one way for both.

Axes: K seeds, those of several splits one split after the other; N rows that can be read, C outputs, F features.
"""

import contextlib
import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from exlm_cli.config.tasks import RowTaskConfig, TaskConfig
from exlm_cli.data import BoolArray
from exlm_cli.data.rows.records import COMPRESSIONS, FORMATS
from exlm_cli.errors import ConfigError
from exlm_cli.files import folder_for_results, refusing, write_together
from exlm_cli.finetune.baselines.baseline import BASELINES, Baseline
from exlm_cli.finetune.cells.model import Finetuned
from exlm_cli.finetune.evaluation.calibration import (
    DEFAULT_LEVEL,
    MIN_OF_EACH,
    MIN_THIRDS_ROWS,
    Calibration,
    PredictedRows,
    check_level,
    read_calibration,
)
from exlm_cli.finetune.evaluation.verdict import describe_predictor
from exlm_cli.finetune.features import FeatureStore, with_descriptors
from exlm_cli.finetune.prediction.training_rows import read_training_rows
from exlm_cli.finetune.results import RunResults, baseline_folder
from exlm_cli.finetune.scores import PREDICTORS, Predictor
from exlm_cli.format import format_number_of, name_some
from exlm_cli.progress import Progress
from exlm_cli.run_dir import resume_command
from exlm_cli.tasks.base import (
    EncodedRows,
    EncodedSplit,
    FloatArray,
    Layout,
    NewRows,
    PredictionSummary,
    SeedOutputs,
    TrainedTask,
)
from exlm_cli.tasks.registry import layout_of
from exlm_cli.tasks.rows.task import ScoredRows, name_columns, without_log10


@dataclass(frozen=True)
class Predicted:
    """Predictions of rows.

    Attributes:
        encoded: Those that can be read.
        outputs: As in `EncodedSplit`.
        columns: Cells of the N readable rows that go into the table, by column.
        labelled: The rows with the calibration; None without labels or a calibration.
        splits: (N,) `train`, `valid` or `none`.
        metrics, metrics_of_new: As in `PredictionSummary`.
        notes: On the predictions.
    """

    encoded: EncodedSplit
    outputs: SeedOutputs
    columns: dict[str, list[str]]
    labelled: PredictedRows | None
    splits: NDArray[np.str_]
    metrics: dict[str, float]
    metrics_of_new: dict[str, float]
    notes: tuple[str, ...]


def predict(
    finetuned: Finetuned,
    path: Path,
    out: Path | None,
    *,
    folder: Path,
    columns: tuple[str, ...] = (),
    predictor: Predictor | None = None,
    interval_level: float = DEFAULT_LEVEL,
    draw: Callable[[PredictedRows, Path], Mapping[Path, bytes]] | None = None,
    explain: Callable[[EncodedSplit, NewRows, Predictor, Path], Mapping[Path, bytes]] | None = None,
    progress: Progress,
) -> PredictionSummary:
    """Predict the rows or questions of a file, write them, and score them where the file has labels.

    The columns of the layout are followed by those of `predict_rows`. All files appear together or not at all.

    Args:
        path: The file, in the layout of the run's task.
        out: File of predictions; None: `predictions-<name of the file>` in `folder`, or with a number after it where
            another file of that name has it.
        folder: Folder of the predictions without `out`.
        columns: Column of the SMILES or text, or both of pairs, for a task that has some; empty: the usual ones.
        predictor, interval_level: As in `predict_rows`.
        draw: Returns figures of the rows, given these and the file of predictions, to be written with the others. It is
            called if the file has labels and the run a calibration.
        explain: Returns files that explain the predictions of the first rows, given the readable rows, what predicts,
            and the folder of these files, `<stem of out>-atoms`, to be written with the others.

    Raises:
        ConfigError: A column that the task does not use, a name of another format, the input file as output, or
            explanations of a run that reads text; otherwise as for `check_options`.
        DataError: The file cannot be read.
        CheckpointError: A file cannot be written, and none is; or a file of the run is missing or altered.
    """
    config, results = finetuned.recipe.task, finetuned.results
    if columns and not isinstance(config, RowTaskConfig):
        raise ConfigError(f"{config.name} finds its own columns; `{columns[0]}` is given", "leave the column out")
    predictor = check_options(finetuned, predictor, interval_level)
    if explain is not None:
        require_molecules(finetuned)
    layout = layout_of(config)
    usual = folder / f"predictions-{stem_of(path)}{layout.suffix}"
    notes: tuple[str, ...] = ()
    with contextlib.ExitStack() as stack:
        if out is None:
            out = stack.enter_context(own_file(usual, path))
            if out != usual:
                notes = (f"{usual} is of another file, so these predictions are in {out.name}",)
        files = _output_files(config, layout, path, out)
        atoms = out.with_name(f"{out.stem}-atoms")
        stack.enter_context(folder_for_results(out.parent, *files))
        stack.enter_context(folder_for_results(out.parent if explain is None else atoms))
        task = TrainedTask(config, results.input_kind, results.loss, results.output_names, results.no_answer_threshold)
        rows = layout.read(task, path, columns, progress)
        found = predict_rows(finetuned, rows, predictor=predictor, interval_level=interval_level, progress=progress)
        table, notes_on_table = rows.as_csv(found.columns)
        contents = dict(zip(files, (*found.encoded.official_files(found.outputs), table), strict=True))
        if draw is not None and found.labelled is not None:
            contents |= draw(found.labelled, out)
        if rows.num_rows and not len(rows.keys):
            unread = f"no row of {path} can be read; the column `problem` of the predictions says why"
            notes_on_table = (*notes_on_table, unread)
        if explain is not None:
            contents |= explain(found.encoded, rows, predictor, atoms)
        write_together(contents)
    notes = (*found.encoded.notes, *rows.notes, *notes_on_table, *found.notes, *notes)
    return _summary_of(found, rows, tuple(contents), predictor, notes)


def _summary_of(
    found: Predicted, rows: NewRows, files: tuple[Path, ...], predictor: Predictor, notes: tuple[str, ...]
) -> PredictionSummary:
    counts = Counter(found.splits.tolist())
    return PredictionSummary(
        files,
        num_rows=rows.num_rows,
        num_unreadable=rows.num_rows - len(rows.keys),
        metrics=found.metrics,
        notes=notes,
        predictor=predictor,
        num_in_training=counts["train"],
        num_in_validation=counts["valid"],
        metrics_of_new=found.metrics_of_new,
        labels=found.encoded.score_labels(found.outputs) if found.metrics else {},
    )


@contextlib.contextmanager
def own_file(usual: Path, data: Path) -> Iterator[Path]:
    """Yield the file for the results of `data`: the one that it had before, else `usual` or a free name like it.

    A hidden file beside it, made before the work, has the path of `data`: so processes that run at once take different
    names. It goes if the work fails.
    """
    with folder_for_results(usual.parent):
        with refusing(f"{usual}: the file could not be written", is_chosen=True):
            mine = os.fsencode(os.path.relpath(data, usual.parent.resolve()))  # holds after a project has moved
            for number in itertools.count(1):
                out = usual if number == 1 else usual.with_name(f"{usual.stem}-{number}{usual.suffix}")
                owner = out.with_name(f".{out.name}.input")
                is_new = not owner.exists()
                if is_new and not out.exists():
                    with contextlib.suppress(FileExistsError), owner.open("xb") as file:
                        file.write(mine)
                if owner.exists() and owner.read_bytes() == mine:
                    break
        try:
            yield out
        except BaseException:
            if is_new:
                owner.unlink(missing_ok=True)
            raise


def _output_files(config: TaskConfig, layout: Layout, path: Path, out: Path) -> tuple[Path, ...]:
    """Return the files of a prediction, `out` first; refuse a name of another format, or that of the input file."""
    if out.suffix.lower() != layout.suffix:
        what = f"`--out {out}`: predictions of {config.name} are a {layout.suffix} file"
        raise ConfigError(what, "give another name")
    files = layout.output_files(out)
    refuse_overwriting(path, *files)
    return files


def require_molecules(finetuned: Finetuned) -> None:
    """Refuse to explain the predictions of a run that reads text.

    Raises:
        ConfigError: It does.
    """
    if finetuned.results.input_kind != "smiles":
        raise ConfigError(
            f"{finetuned.run} reads text; explanations are of the atoms of molecules", "leave `explain` out"
        )


def check_options(finetuned: Finetuned, predictor: Predictor | None, interval_level: float) -> Predictor:
    """Return what predicts: as asked, else what is best on the run's validation rows; without baselines, the model.

    Raises:
        ConfigError: A level out of bounds or for a run that predicts no values; a predictor that there is not.
    """
    check_level(interval_level, finetuned.results.loss, finetuned.run)
    results, known = finetuned.results, finetuned.results.predictors
    if predictor is not None and predictor not in PREDICTORS:
        raise ConfigError(f"`--with {predictor}`: accepted: {', '.join(PREDICTORS)}", "leave it out for the best")
    if known is None and predictor not in (None, "model"):
        trained = "leave it out; fine-tuning trains baselines unless `--no-baseline` is given or it takes long"
        raise ConfigError(
            f"{finetuned.run} has no baseline, which `--with {predictor}` needs",
            "leave it out; SQuAD has no baseline" if results.loss == "span" else trained,
        )
    return predictor or ("model" if known is None else known.best)


def predict_rows(
    finetuned: Finetuned, rows: NewRows, *, predictor: Predictor, interval_level: float, progress: Progress
) -> Predicted:
    """Predict rows of a file or in memory, and score them where they have labels.

    The columns of the task are followed by `<name>_calibrated` probabilities or, for values, the interval
    `<name>_low_90`, `<name>_high_90` at `interval_level`; then by `in_split`, which is `train`, `valid` or `none`, and
    for molecules `nearest_train_tanimoto`.

    Spans, and models of some seeds alone, have no calibrated columns.

    Args:
        predictor, interval_level: Result of `check_options`; share of the true values that intervals should hold.

    Raises:
        CheckpointError: A file of the run is missing or altered.
    """
    results = finetuned.results
    known, calibration = read_training_rows(finetuned.run), Calibration(outputs=())
    if finetuned.is_whole and results.loss != "span":
        calibration = read_calibration(finetuned.run, predictor)
    store = FeatureStore()
    encoded = rows.encode(finetuned.tokenizer, finetuned.sequence_length)
    encoded = with_descriptors(encoded, finetuned.recipe.task, store, progress)
    texts = encoded.texts if isinstance(encoded, ScoredRows) else ()
    outputs = predict_outputs(finetuned, encoded, texts, predictor, store, progress)
    split_N = known.splits_of(rows.keys)
    nearest_SN = known.nearest_tanimoto(rows.keys, progress) if results.input_kind == "smiles" else None
    columns = encoded.prediction_columns(outputs)
    labelled: PredictedRows | None = None
    notes = [_describe_choice(finetuned, predictor), _describe_seeds(finetuned)]
    if calibration.outputs:
        assert isinstance(outputs, np.ndarray), "spans have no calibration"
        # as validation rows are as far away as from the training rows of their own split
        near = None if nearest_SN is None else nearest_SN.mean(axis=0)
        calibrated = PredictedRows(
            rows=rows.readable,
            targets=encoded.targets,
            similarity=near,
            loss=results.loss,
            names=results.output_names,
            by_seed=outputs,
            calibration=calibration,
            level=interval_level,
        )
        added, notes_on_calibration = _calibrated_columns(calibrated, is_log10=finetuned.recipe.task.is_log10)
        columns |= added
        notes += notes_on_calibration
        labelled = calibrated if encoded.is_labelled else None
    columns["in_split"] = split_N.tolist()
    if nearest_SN is not None:
        columns["nearest_train_tanimoto"] = [f"{value:.4f}" for value in nearest_SN.max(axis=0)]
    scores, of_new = _score(encoded, outputs, labelled, split_N == "none")
    counts, names = Counter(split_N.tolist()), {"train": "training", "valid": "validation"}
    counted = [f"of the {n} split: {counts[s]:,} of {len(split_N):,}" for s, n in names.items() if counts[s]]
    if counted:
        scored = "; scored with and without them" if of_new else ""
        notes.append(f"rows {', '.join(counted)}{scored}")
    shown = tuple(note for note in notes if note)
    return Predicted(encoded, outputs, columns, labelled, split_N, scores, of_new, shown)


def predict_outputs(
    finetuned: Finetuned,
    encoded: EncodedRows,
    texts: Sequence[tuple[str, ...]],
    predictor: Predictor,
    store: FeatureStore,
    progress: Progress,
) -> SeedOutputs:
    """Return the outputs of what predicts, for each seed on each split.

    Args:
        encoded, texts: Rows as the model and as a baseline read them; a run without baselines needs no texts.
        store: Features of molecules that are known, which grows.
    """
    if predictor == "model" or not len(encoded):
        return finetuned.run_seeds(encoded, progress)
    of_baseline: list[FloatArray] = []
    for of_split in finetuned.results.of_splits:
        assert of_split.predictors is not None, "it was checked"
        baseline = BASELINES[of_split.predictors.baselines[0]]
        of_baseline += _baseline_predictions(finetuned, of_split, baseline, texts, store, progress)
    baseline_KNC = np.stack(of_baseline)
    if predictor == "both":
        baseline_KNC = (np.asarray(finetuned.run_seeds(encoded, progress)) + baseline_KNC) / 2
    return baseline_KNC


def _baseline_predictions(
    finetuned: Finetuned,
    of_split: RunResults,
    baseline: Baseline,
    texts: Sequence[tuple[str, ...]],
    store: FeatureStore,
    progress: Progress,
) -> list[FloatArray]:
    """Return K arrays of (N, C) probabilities or values of a baseline on one split, as it was trained there."""
    by_seed: list[FloatArray] = []
    for seed in of_split.seeds if baseline.has_seed else of_split.seeds[:1]:
        place = baseline_folder(finetuned.run, baseline.model, of_split.split_seeds[0], seed)
        fitted = baseline.read(
            place / baseline.file,
            f"delete {place} and continue with `{resume_command('finetune', finetuned.run)}`",
            loss=of_split.loss,
            num_outputs=len(of_split.output_names),
            num_texts=len(texts[0]),
            store=store,
        )
        by_seed.append(fitted.predict(texts, progress))
    return by_seed if baseline.has_seed else by_seed * len(of_split.seeds)


def _describe_choice(finetuned: Finetuned, predictor: Predictor) -> str:
    """Return what predicted, and over how many splits; empty for the seeds of a model alone on one split."""
    results = finetuned.results
    parts = []
    if results.predictors is not None:
        best = ", best on the validation rows" if predictor == results.predictors.best else ""
        parts.append(f"predicted with {describe_predictor(predictor, results.predictors)}{best}")
    if len(results.split_seeds) > 1:
        seeds = format_number_of(len(results.seeds), "seed")
        parts.append(f"means over {len(results.split_seeds)} splits of the rows, {seeds} each")
    return "; ".join(parts)


def _describe_seeds(finetuned: Finetuned) -> str:
    """Return a note on predictions of some of the seeds; empty for those of all."""
    if finetuned.is_whole:
        return ""
    shown = ", ".join(map(str, finetuned.results.seeds))
    calibration = (
        "" if finetuned.results.loss == "span" else "; the calibration is of all seeds' mean, so it is left out"
    )
    return f"seeds {shown} alone{calibration}"


def _score(
    encoded: EncodedSplit, outputs: SeedOutputs, labelled: PredictedRows | None, is_new_N: BoolArray
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


def _calibrated_columns(rows: PredictedRows, *, is_log10: bool) -> tuple[dict[str, list[str]], list[str]]:
    """Return columns of intervals or calibrated probabilities, and notes on outputs that have none, or plain ones."""
    loss, names, mean_NC, calibration = rows.loss, rows.names, rows.mean, rows.calibration
    equal: list[str] = []
    if loss == "regression":
        half_NC, percent = rows.half_widths, f"{100 * rows.level:g}"
        has_C = np.array(calibration.has_intervals(rows.level))
        values = {f"low_{percent}": mean_NC - half_NC, f"high_{percent}": mean_NC + half_NC}
        equal = [
            f"`{names[index]}`" for index in calibration.of_one_width if has_C[index] and rows.similarity is not None
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
        few = f"fewer than {MIN_THIRDS_ROWS} validation rows of {name_some(equal)}"
        notes.append(f"intervals are equally wide for all rows: {few}")
    if loss == "classes" and missing:
        return {}, notes
    named = [name for name, has in zip(names, has_C, strict=True) if has]
    columns = [name_columns(named, end, values_NC[:, has_C]) for end, values_NC in values.items()]
    if is_log10:
        columns += [
            name_columns(without_log10(named), end, 10 ** values_NC[:, has_C]) for end, values_NC in values.items()
        ]
    return {name: cells for of_end in columns for name, cells in of_end.items()}, notes


def refuse_overwriting(data: Path, *written: Path) -> None:
    """Refuse to overwrite the input file.

    Raises:
        ConfigError: One of `written` is `data`.
    """
    for path in written:
        if data.exists() and path.exists() and path.samefile(data):
            raise ConfigError(f"`--out {written[0]}` would overwrite the input file {data}", "name another file")


def stem_of(path: Path) -> str:
    """Return `dev-v2.0` of `dev-v2.0.json.gz`."""
    while path.suffix.lower() in (*COMPRESSIONS, *FORMATS):
        path = path.with_suffix("")
    return path.name
