"""Fine-tuning from Python data: the same recipe, rows and run as `exlm finetune csv`, without a file of either."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exlm_cli.api.frames import as_frame, check_rows, strings
from exlm_cli.api.run import Run, load
from exlm_cli.config.finetune import FinetuneRecipe, usual_csv_recipe
from exlm_cli.config.load import load_recipe
from exlm_cli.config.tasks import InputKind
from exlm_cli.data.smiles import SMILES_TOKENS
from exlm_cli.errors import ConfigError, DataError
from exlm_cli.export.given import local_run
from exlm_cli.files import write_atomically
from exlm_cli.finetune.run import run_finetuning
from exlm_cli.finetune.scores import AVERAGE
from exlm_cli.format import name_some
from exlm_cli.paths import cache_root
from exlm_cli.progress import Progress, SilentProgress
from exlm_cli.train.task import Callback

if TYPE_CHECKING:
    from pandas import DataFrame


def fit(
    data: Any,
    y: Any = None,
    *,
    smiles: str | None = None,
    text: str | tuple[str, str] | None = None,
    labels: Sequence[str] = (),
    kind: InputKind | None = None,
    split: str | None = None,
    split_column: str | None = None,
    seeds: Sequence[int] | None = None,
    num_replicates: int | None = None,
    recipe: str | Path | None = None,
    overrides: Sequence[str] = (),
    checkpoint: str | Path | None = None,
    baseline: bool | None = None,
    out: str | Path | None = None,
    device: str | None = None,
    workers: int | None = 1,
    callbacks: Sequence[Callback] = (),
    progress: Progress | None = None,
) -> Run:
    """Fine-tune a model on a DataFrame, or on rows and their labels, and return the run.

    The rows are kept as CSV in the cache, under a name that follows from their content, so that the run can be resumed.

    Args:
        data: A DataFrame with all columns; or SMILES, texts or pairs of texts in a list, array or Series, with `y`.
        y: Labels of the rows, one or several columns of them, NaN or None where missing; None: columns of `data`.
        smiles, text: Column of the SMILES, or of the text, two for pairs; None: a column with a usual name for SMILES.
        labels: Columns with the labels.
        kind: What rows without columns are; None: SMILES if all of them have SMILES tokens alone, else text.
        split, split_column, seeds, num_replicates, device: As the options of `exlm finetune`; None: the recipe's.
        recipe: Name or file of a recipe; None: that of `exlm finetune csv`.
        overrides: `section.key=value`, as after `--set`.
        checkpoint: What the training begins with; None: the model in the package that reads such rows.
        baseline, workers, callbacks: As for `run_finetuning`.
        out: Run directory; None: `runs/<recipe>-<time>`.
        progress: Reports the work; None: silent.

    Raises:
        ConfigError: An option is not accepted, or no labels are given.
        DataError: Rows or labels cannot be used.
        ExlmError: As for `run_finetuning`.
    """
    progress = progress or SilentProgress()
    task: dict[str, Any] = {"name": "csv", "split": split, "split_column": split_column}
    frame = as_frame(data)
    if y is None and frame is not None:
        table, columns = frame, {"smiles_column": smiles, "text_column": text, "label_columns": list(labels)}
    else:
        table, columns = _joined(data, y, kind)
    if not columns["label_columns"]:
        raise ConfigError("no labels are given", "name their columns with `labels=[...]`, or give them as `y`")
    task |= {**columns, "files.train": str(_keep(table))}
    options = {**{f"task.{key}": value for key, value in task.items()}, "seeds": None if seeds is None else list(seeds)}
    options |= {"num_replicates": num_replicates, "device": device}
    own = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in options.items() if value is not None]
    given = [*own, *overrides]
    chosen = load_recipe(recipe or usual_csv_recipe(given), given, kind=FinetuneRecipe)
    start = None
    if chosen.init == "checkpoint" or checkpoint is not None:
        start = local_run(Path(checkpoint or f"bundled:{chosen.task.input_kind}"), progress)
    run = run_finetuning(
        chosen,
        checkpoint=start,
        out=out,
        baseline=baseline,
        workers=workers,
        callbacks=callbacks,
        progress=progress,
    )
    return load(run.run_dir, device=device or "auto", progress=progress)


def cross_validate(data: Any, y: Any = None, *, num_splits: int = 5, **options: Any) -> "DataFrame":
    """Fine-tune and score on several splits of the rows, and return what each scores on its test rows.

    The splits are drawn anew, 80/10/10: molecules by scaffold (`scaffold-balanced`), texts at random, unless `split`
    says otherwise.

    Args:
        data, y, options: As for `fit`.
        num_splits: Number of splits.

    Returns:
        A line for each model (`exlm`, baselines and `both`) and split, a column for each metric; `attrs` has the path
        of the `run`, whose models predict together.

    Raises:
        ExlmError: As for `fit`.
    """
    options = {"split": _usual_split(data, options), **options}
    run = fit(data, y, num_replicates=num_splits, **options)
    finished = run.finished
    rows = finished.scores.reported
    rows = rows[(rows.seed == AVERAGE) & (rows.split == finished.results.scored_split) & (rows.label == "")]
    table = rows.pivot(index=["model", "split_seed"], columns="metric", values="value")
    table.attrs = {"run": str(run.path)}
    return table


def _usual_split(data: Any, options: dict[str, Any]) -> str:
    """Return the split by which rows are drawn anew."""
    is_text = options.get("text") is not None or options.get("kind") == "text"
    if as_frame(data) is not data and not is_text and options.get("kind") is None:
        is_text = kind_of_rows(check_rows(data, _num_texts(data))) == "text"
    return "random" if is_text else "scaffold-balanced"


def _joined(data: Any, y: Any, kind: InputKind | None) -> "tuple[DataFrame, dict[str, Any]]":
    """Return rows and labels as one table, and what its columns are."""
    import pandas as pd

    if y is None:
        raise ConfigError("no labels are given", "give them as `y`, or a DataFrame with `labels=[...]`")
    frame = as_frame(data)
    if frame is not None:
        data = [tuple(cells) for cells in zip(*(strings(frame[name]) for name in frame.columns), strict=True)]
    rows = check_rows(data, _num_texts(data))
    targets = pd.DataFrame(y.to_numpy() if hasattr(y, "to_numpy") else y)
    named = getattr(y, "columns", None) if hasattr(y, "columns") else [getattr(y, "name", None) or "y"]
    if named is None or len(named) != targets.shape[1]:
        named = [f"y{number}" for number in range(targets.shape[1])]
    if len(targets) != len(rows):
        raise DataError(f"there are {len(rows):,} rows, and {len(targets):,} labels", "give a label for each row")
    kind = kind or kind_of_rows(rows)
    inputs = ["input"] if len(rows[0]) == 1 else ["first", "second"]
    table = pd.DataFrame(rows, columns=inputs)
    names = [f"{name} (label)" if name in inputs else str(name) for name in named]
    table[names] = targets.to_numpy()
    column = inputs[0] if len(inputs) == 1 else inputs
    return table, {f"{kind}_column": column, "label_columns": names}


def _num_texts(data: Any) -> int:
    """Return how many texts the first row has."""
    first = next(iter(data), "") if not isinstance(data, str) else data
    return 1 if isinstance(first, str) else max(1, len(first))


def kind_of_rows(rows: list[tuple[str, ...]]) -> InputKind:
    """Return what rows are, by their characters."""
    return "smiles" if all(len(row) == 1 and SMILES_TOKENS.fullmatch(row[0].strip()) for row in rows) else "text"


def _keep(table: "DataFrame") -> Path:
    """Write a table as CSV into the cache, and return its path.

    Raises:
        DataError: It has no rows, or a name of a column twice.
    """
    names = [str(name) for name in table.columns]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise DataError(
            f"the table has two columns {name_some(f'`{name}`' for name in twice)}", "give each a name of its own"
        )
    content = table.to_csv(index=False).encode("utf-8", errors="replace")
    path = cache_root(None) / "frames" / f"{hashlib.sha256(content).hexdigest()[:16]}.csv"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    return path
