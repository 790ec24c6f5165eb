"""Fine-tuning from Python data gives the run of `exlm finetune csv` on these rows; scikit-learn takes its estimators.

Texts with and without one word, and a tiny model: what is asserted of numbers holds for any weights.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.model_selection import cross_val_score
from sklearn.utils.estimator_checks import estimator_checks_generator

import exlm_cli
from exlm_cli.api.estimators import ExlmClassifier, ExlmRegressor
from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.load import load_recipe
from exlm_cli.errors import ConfigError, DataError
from exlm_cli.finetune.run import run_finetuning
from tests.unit.finetune.synthetic import WORDS

QUICK = ["train.max_epochs=1", "train.num_threads=1", "device=cpu", "train.batch_sequences=16"]


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    rng = np.random.default_rng(4)
    texts = [" ".join(rng.choice(WORDS, size=4)) for _ in range(60)]
    columns = {"note": texts, "amber": ["amber" in text for text in texts], "n": np.arange(60) / 7}
    return pd.DataFrame(columns, index=[f"row {number}" for number in range(60)])


@pytest.fixture(scope="module")
def run(frame: pd.DataFrame, text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> exlm_cli.Run:
    out = tmp_path_factory.mktemp("fit") / "run"
    options: dict[str, Any] = {"checkpoint": text_model, "seeds": [3], "overrides": QUICK, "out": out}
    return exlm_cli.fit(frame, text="note", labels=["amber"], baseline=True, **options)


def test_a_frame_gives_the_run_of_its_file(run, frame, text_model, tmp_path):
    frame.to_csv(tmp_path / "rows.csv", index=False)
    given = ["task.name=csv", f"task.files.train={tmp_path / 'rows.csv'}", "task.text_column=note", "seeds=[3]"]
    recipe = load_recipe("csv-encoder", [*given, "task.label_columns=[amber]", *QUICK], kind=FinetuneRecipe)
    made = run_finetuning(recipe, checkpoint=text_model, out=tmp_path / "run", baseline=True)
    pd.testing.assert_frame_equal(run.finished.scores.table, made.scores.table)
    theirs = exlm_cli.load(made.run_dir, device="cpu").predict(list(frame.note), predictor="both")
    pd.testing.assert_frame_equal(run.predict(list(frame.note), predictor="both"), theirs)


def test_rows_of_any_form_have_the_same_predictions_and_keep_index_and_columns(run, frame):
    some = frame.iloc[[5, 2, 9]]
    expected = run.predict(list(some.note), predictor="model")
    of_frame, of_series = (run.predict(rows, predictor="model") for rows in (some, some.note))
    assert list(of_frame.index) == list(of_series.index) == ["row 5", "row 2", "row 9"]
    pd.testing.assert_frame_equal(of_frame[list(frame.columns)], some)
    assert list(of_series.columns) == ["note", *expected.columns]
    arrays = (some.note.to_numpy(), some[["note"]].to_numpy(), tuple(some.note))
    for found in (of_frame, of_series, *(run.predict(rows, predictor="model") for rows in arrays)):
        pd.testing.assert_frame_equal(found[expected.columns].reset_index(drop=True), expected)
    np.testing.assert_array_equal(run.embed(some.note).mean, run.embed(list(some.note)).mean)
    missing = run.predict(pd.Series(["amber fern", None]))
    assert missing.problem.astype(bool).tolist() == [False, True]
    with pytest.raises(DataError, match="which column holds the text"):
        run.predict(some.rename(columns={"note": "other"}))


def test_texts_and_their_labels_are_rows_of_a_table(frame, text_model, tmp_path):
    """Values of a Series and of an array; a pair of texts is two columns."""
    options: dict[str, Any] = {"checkpoint": text_model, "seeds": [1], "overrides": QUICK, "baseline": False}
    run = exlm_cli.fit(frame.note, frame.n, out=tmp_path / "a", **options)
    assert run.finished.results.output_names == ("n",)
    pairs = list(zip(frame.note, frame.note[::-1], strict=True))
    values = np.stack([frame.n, -frame.n], axis=1)
    run = exlm_cli.fit(pairs, values, out=tmp_path / "b", **options)
    assert run.finished.results.output_names == ("y0", "y1")
    assert run.predict(pairs[0]).y1_predicted.notna().all()


def test_several_splits_give_a_line_each(frame, text_model, tmp_path):
    options: dict[str, Any] = {"checkpoint": text_model, "seeds": [1], "overrides": QUICK, "baseline": True}
    found = exlm_cli.cross_validate(frame, text="note", labels=["n"], num_splits=2, out=tmp_path / "a", **options)
    assert found.index.tolist() == [(model, split) for model in ("both", "exlm", "tfidf") for split in (0, 1)]
    scores = exlm_cli.load(found.attrs["run"], device="cpu").finished.scores
    assert found.rmse["tfidf"].mean() == scores.average("test", "rmse", model="tfidf").mean


def test_what_cannot_be_fitted_is_told(frame):
    with pytest.raises(ConfigError, match="no labels are given"):
        exlm_cli.fit(frame, text="note")
    with pytest.raises(DataError, match="60 rows, and 59 labels"):
        exlm_cli.fit(frame.note, frame.n[:-1])
    with pytest.raises(DataError, match="two columns `note`"):
        exlm_cli.fit(frame.rename(columns={"n": "note"}), text="note", labels=["amber"])


def test_a_classifier_predicts_as_its_run_and_survives_a_pickle(frame, text_model):
    y = np.where(frame.amber, "with", "free")
    model = ExlmClassifier(checkpoint=str(text_model), overrides=QUICK, device="cpu").fit(frame.note, y)
    assert model.classes_.tolist() == ["free", "with"]
    probabilities = model.predict_proba(frame.note)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)
    assert model.predict(frame.note).tolist() == model.classes_[probabilities.argmax(axis=1)].tolist()
    again = pickle.loads(pickle.dumps(model))
    folder = Path(model.run_dir_)
    assert again.run_dir_ != model.run_dir_
    del model
    assert not folder.exists()
    np.testing.assert_array_equal(again.predict_proba(list(frame.note)), probabilities)
    with pytest.raises(ValueError, match="row 2: the text is empty"):
        again.predict(["amber", ""])
    with pytest.raises(ValueError, match="one class"):
        clone(again).fit(frame.note, np.zeros(60))


def test_a_regressor_is_cross_validated_by_scikit_learn(frame, text_model):
    """The values are the number of ambers, which TF-IDF finds, so that what predicts is better than their mean."""
    model = ExlmRegressor(checkpoint=str(text_model), overrides=QUICK, device="cpu", baseline=True)
    scores = cross_val_score(model, frame.note, frame.note.str.count("amber"), cv=2, scoring="r2")
    assert scores.shape == (2,)
    assert (scores > 0).all()


WITHOUT_ROWS = {
    "check_classifiers_regression_target",
    "check_do_not_raise_errors_in_init_or_set_params",
    "check_estimator_cloneable",
    "check_estimator_repr",
    "check_estimators_unfitted",
    "check_get_params_invariance",
    "check_mixin_order",
    "check_no_attributes_set_in_init",
    "check_parameters_default_constructible",
    "check_requires_y_none",
    "check_set_params",
    "check_supervised_y_no_nan",
    "check_valid_tag_types",
}


@pytest.mark.parametrize("estimator", [ExlmClassifier(), ExlmRegressor()])
def test_scikit_learns_own_checks(estimator):
    """Those that need no rows that can be read: they give numbers, and rows are strings."""
    ran = [check(made) for made, check in estimator_checks_generator(estimator) if check.func.__name__ in WITHOUT_ROWS]
    assert len(ran) >= len(WITHOUT_ROWS) - 1
