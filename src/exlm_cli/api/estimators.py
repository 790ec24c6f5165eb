"""Estimators of scikit-learn on fine-tuning: rows are SMILES or texts.

Axes: R rows, C classes or values.
"""

import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.model_selection import train_test_split
from sklearn.utils import check_array, check_consistent_length, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from exlm_cli.api.fitting import fit, kind_of_rows
from exlm_cli.api.frames import as_frame, check_rows, strings
from exlm_cli.api.run import Run, load
from exlm_cli.config.tasks import InputKind
from exlm_cli.errors import DataError
from exlm_cli.tasks.base import FloatArray

_SPLIT = "exlm split"
_LABEL = "label {:04d}"


class _ExlmEstimator(BaseEstimator):  # type: ignore[misc]
    """What classifier and regressor share.

    Args:
        kind: What rows are; None: SMILES if all training rows have SMILES tokens alone, else text.
        recipe, overrides, checkpoint, seeds, baseline, device: As for `exlm_cli.fit`.
        validation_fraction: Share of the rows on which the best epoch and the predictor are chosen.
        random_state: Seed of that share.
    """

    def __init__(
        self,
        *,
        kind: InputKind | None = None,
        recipe: str | None = None,
        overrides: Sequence[str] = (),
        checkpoint: str | None = None,
        seeds: Sequence[int] = (1,),
        baseline: bool | None = None,
        validation_fraction: float = 0.1,
        random_state: int = 0,
        device: str = "auto",
    ) -> None:
        self.kind = kind
        self.recipe = recipe
        self.overrides = overrides
        self.checkpoint = checkpoint
        self.seeds = seeds
        self.baseline = baseline
        self.validation_fraction = validation_fraction
        self.random_state = random_state
        self.device = device

    run_dir_: str

    @property
    def run_(self) -> Run:
        """The run, for `explain`, `embed`, intervals and notes.

        Raises:
            NotFittedError: It is not fitted.
        """
        check_is_fitted(self, "run_dir_")
        if getattr(self, "_loaded", None) is None:
            self._loaded = load(self.run_dir_, device=self.device)
        run: Run = self._loaded
        return run

    def _fit(self, X: Any, targets: NDArray[Any], label_kind: str, stratify: NDArray[Any] | None) -> None:
        import pandas as pd

        rows = _rows(X)
        check_consistent_length(rows, targets)
        inputs = ["first", "second"][: len(rows[0])]
        table = pd.DataFrame(rows, columns=inputs)
        names = [_LABEL.format(number) for number in range(targets.shape[1])]
        table[names] = targets
        options = {"test_size": self.validation_fraction, "random_state": self.random_state}
        _, held_out = train_test_split(np.arange(len(rows)), stratify=stratify, **options)
        table[_SPLIT] = np.where(np.isin(np.arange(len(rows)), held_out), "valid", "train")
        kind = self.kind or kind_of_rows(rows)
        folder = Path(tempfile.mkdtemp(prefix="exlm-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        columns: dict[str, Any] = {kind: inputs[0] if len(inputs) == 1 else ("first", "second")}
        self._loaded = fit(
            table,
            labels=names,
            split_column=_SPLIT,
            seeds=self.seeds,
            recipe=self.recipe,
            overrides=[f"task.label_kind={label_kind}", *self.overrides],
            checkpoint=self.checkpoint,
            baseline=self.baseline,
            out=folder / "run",
            device=self.device,
            **columns,
        )
        self.run_dir_ = str(folder / "run")
        self.n_texts_in_ = len(inputs)

    def _predicted(self, X: Any, ending: str) -> FloatArray:
        """Return (R, C) numbers.

        Raises:
            NotFittedError: It is not fitted.
            ValueError: A row cannot be read.
        """
        check_is_fitted(self, "run_dir_")
        table = self.run_.predict(_rows(X))
        if unread := [number for number, problem in enumerate(table.problem, start=1) if problem]:
            raise ValueError(f"row {unread[0]}: {table.problem.iloc[unread[0] - 1]}")
        found: FloatArray = table[[name for name in table.columns if name.endswith(ending)]].to_numpy(float)
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Return the parameters and the files of the run."""
        state = {name: value for name, value in super().__getstate__().items() if name != "_loaded"}
        if folder := state.pop("run_dir_", None):
            files = [path for path in Path(folder).rglob("*") if path.is_file()]
            state["_files"] = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Write the files of the run into a folder of its own."""
        files = state.pop("_files", None)
        super().__setstate__(state)
        if files is not None:
            folder = Path(tempfile.mkdtemp(prefix="exlm-"))
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            for name, content in files.items():
                path = folder / "run" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            self.run_dir_ = str(folder / "run")

    def __sklearn_tags__(self) -> Any:
        """Say that rows are strings."""
        tags = super().__sklearn_tags__()
        tags.input_tags.string = True
        tags.input_tags.one_d_array = True
        return tags


class ExlmClassifier(ClassifierMixin, _ExlmEstimator):  # type: ignore[misc]
    """Classifier of SMILES, texts or pairs of texts.

    Attributes:
        classes_: (C,) classes, sorted.
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Fine-tune a model, and the baselines beside it.

        Args:
            X: R strings, or pairs of them, in a list, array, Series or DataFrame.
            y: (R,) classes.

        Raises:
            ValueError: Rows or classes are none, or there is one class.
        """
        y = _targets(self, y)
        check_classification_targets(y)
        self.classes_, codes = np.unique(column_or_1d(y, warn=True), return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError("all rows have one class: there is nothing to learn")
        names = np.array([_LABEL.format(code) for code in codes])
        self._fit(X, names[:, None], "classes", codes)
        return self

    def predict_proba(self, X: Any) -> FloatArray:
        """Return (R, C) probabilities of what is best on the validation rows: the model, a baseline or both."""
        found = self._predicted(X, "_probability")
        scaled: FloatArray = found / found.sum(axis=1, keepdims=True)
        return scaled

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the (R,) most probable classes."""
        best = self.predict_proba(X).argmax(axis=1)
        return np.asarray(self.classes_[best])


class ExlmRegressor(RegressorMixin, _ExlmEstimator):  # type: ignore[misc]
    """Regressor of SMILES, texts or pairs of texts."""

    def fit(self, X: Any, y: Any) -> Self:
        """Fine-tune a model, and the baselines beside it.

        Args:
            X: R strings, or pairs of them, in a list, array, Series or DataFrame.
            y: (R,) or (R, C) numbers; of several columns some may be missing, NaN.

        Raises:
            ValueError: Rows or numbers are none.
        """
        values = np.asarray(_targets(self, y), dtype=np.float64)
        self.has_columns_ = values.ndim == 2
        self._fit(X, values if self.has_columns_ else values[:, None], "regression", None)
        return self

    def predict(self, X: Any) -> FloatArray:
        """Return (R,) or (R, C) numbers, as `y` had them, of what is best on the validation rows."""
        found = self._predicted(X, "_predicted")
        return found if self.has_columns_ else found[:, 0]


def _rows(X: Any) -> list[tuple[str, ...]]:
    """Return rows of one or two strings.

    Raises:
        ValueError: They are none.
    """
    frame = as_frame(X)
    if frame is not None:
        X = [tuple(cells) for cells in zip(*(strings(frame[name]) for name in frame.columns), strict=True)]
    elif hasattr(X, "tolist"):
        X = X.tolist()
    first = next(iter(X), "") if isinstance(X, Sequence) else ""
    num_texts = 1 if isinstance(first, str) or not hasattr(first, "__len__") else max(1, min(2, len(first)))
    try:
        rows = check_rows(X, num_texts)
    except DataError as error:
        raise ValueError(f"{error.message}: {error.hint}") from error
    if not rows:
        raise ValueError("there are no rows")
    return rows


def _targets(estimator: BaseEstimator, y: Any) -> NDArray[Any]:
    """Return labels as an array.

    Raises:
        ValueError: There are none, or they are missing or infinite.
    """
    if y is None:
        raise ValueError(f"{type(estimator).__name__} requires y to be passed, but the target y is None")
    is_table = getattr(y, "ndim", 1) == 2
    found: NDArray[Any] = check_array(
        y, dtype=None, ensure_2d=False, ensure_all_finite="allow-nan" if is_table else True, input_name="y"
    )
    return found
