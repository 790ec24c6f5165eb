"""Runs from Python: predictions are those that training wrote, vectors those of a forward pass, fillings sum to one."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from scipy.special import expit

import exlm_cli
from exlm_cli.dag.figures import render_graph
from exlm_cli.errors import CheckpointError, ConfigError, DataError
from exlm_cli.finetune.cells.model import load_finetuned
from exlm_cli.finetune.prediction.predict import predict
from exlm_cli.ops import alignment
from exlm_cli.progress import SilentProgress
from tests.unit.finetune.finetuned_runs import LONGER, SMILES, read_rows, squad_run, write_rows
from tests.unit.finetune.synthetic import make_pretrained, read_part
from tests.unit.tasks.squad.test_task import PARAGRAPHS, QUESTIONS


def _written(run: Path, split: Any) -> np.ndarray:
    """Return the (N, C) predictions that training wrote of a split, means over the seeds."""
    return np.asarray(read_part(run, split)[1].mean(axis=0))


def test_predictions_are_those_of_training_and_rows_keep_their_order(molecules):
    rows = [LONGER[row] for row in json.loads((molecules / "split.json").read_text())["indices"]["test"]]
    run = exlm_cli.load(molecules, device="cpu")
    found = run.predict([rows[0], "no molecule", *rows[1:]])
    assert run.kind == "finetune"
    assert found.attrs["predictor"] == "model"
    assert [bool(problem) for problem in found.problem] == [False, True, *[False] * (len(rows) - 1)]
    values = found[["active_probability", "toxic_probability"]]
    assert np.isnan(values.iloc[1]).all()
    readable = np.delete(values.to_numpy(), 1, axis=0)
    np.testing.assert_allclose(readable, _written(molecules, "test"), atol=1e-6)
    assert len(run.predict([])) == 0


def test_a_model_is_in_evaluation_mode_also_after_it_has_predicted(molecules):
    """With dropout, two forward passes of one molecule would differ."""
    run = exlm_cli.load(molecules, device="cpu")
    assert repr(run).startswith(f"<exlm finetune run {molecules}: reads smiles, ")
    for use in (run.predict, run.embed, run.explain):
        use(SMILES[:2])
        assert not any(module.training for module in run.model.modules())


def test_the_table_in_memory_is_the_one_that_exlm_predict_writes(lengths_run, tmp_path):
    rows = ["amber fern", "elder"]
    table = write_rows(tmp_path / "new.csv", ["text"], [[row] for row in rows])
    found = exlm_cli.load(lengths_run, device="cpu").predict(rows, interval_level=0.5)
    finetuned, out = load_finetuned(lengths_run, device="cpu"), tmp_path / "out.csv"
    predict(finetuned, table, out, folder=tmp_path, interval_level=0.5, progress=SilentProgress())
    written = read_rows(out)
    assert list(found.columns) == [name for name in written[0] if name not in ("line", "text")]
    assert "length_low_50" in found.columns
    for name in found.columns:
        cells = [row[name] for row in written]
        assert found[name].tolist() == (cells if found[name].dtype != float else list(map(float, cells)))


@pytest.fixture(scope="module")
def independent_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pretrained(tmp_path_factory.mktemp("independent") / "run", model={"alignment": "independent"})


MISTAKES: list[tuple[str, Callable[[Any], object], type[Exception], str]] = [
    ("molecules", lambda run: run.predict(5), DataError, "`rows` is int, not a list"),
    ("molecules", lambda run: run.predict(["CCO", 3]), DataError, "row 2 is 3, not a string"),
    ("molecules", lambda run: run.predict(["CCO", "C\ud800"]), DataError, "row 2 contains a lone surrogate"),
    ("molecules", lambda run: run.predict(["CCO"], predictor="all"), ConfigError, "`--with all`: accepted: model,"),
    ("molecules", lambda run: run.predict(["CCO"], interval_level=0.5), ConfigError, "`--interval-level 0.5` is for"),
    ("molecules", lambda run: run.embed(["CCO"], seeds=[1, 1]), ConfigError, "`seeds=[1, 1]`: the run has 1, 2"),
    ("smiles_model", lambda run: run.embed(["CCO"], seeds=[1]), ConfigError, "is a pre-trained run, of one seed"),
    ("molecules", lambda run: run.fill("C[MASK]"), CheckpointError, "is a fine-tuned run, which fills no masks"),
    ("smiles_model", lambda run: run.predict(["CCO"]), CheckpointError, "is a pre-trained run, which predicts no"),
    ("text_model", lambda run: run.fill(pandas.DataFrame({"text": ["[MASK]"]})), DataError, "is DataFrame, not a list"),
    ("text_model", lambda run: run.fill("half \ud800 [MASK]"), DataError, r"'half \ud800 [MASK]' contains a lone surr"),
    ("text_model", lambda run: run.fill("[MASK]", num_fillings=0), ConfigError, "`num_top=3`: accepted: 1 or more"),
    ("text_model", lambda run: run.fill("[MASK]", length="one"), ConfigError, "`length=one` is not one of exact, any"),
    ("independent_model", lambda run: run.fill("[MASK]", length="any"), ConfigError, "`length=any` needs `alignment: "),
]


@pytest.mark.parametrize(("name", "call", "kind", "message"), MISTAKES)
def test_a_mistake_is_named(request, name, call, kind, message):
    run = exlm_cli.load(request.getfixturevalue(name), device="cpu")
    with pytest.raises(kind, match=re.escape(message)):
        call(run)


def test_arguments_of_another_kind_are_refused_before_a_folder_is_made(tmp_path):
    recipe, out = exlm_cli.load_recipe("quickstart-text"), tmp_path / "run"
    mistakes: list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any], str]] = [
        (exlm_cli.run_pretraining, ("quickstart-text",), {"out": out}, "the recipe is a str, not a PretrainRecipe"),
        (exlm_cli.run_pretraining, (recipe,), {"out": out, "callbacks": [exlm_cli.Callback]}, "is not a callback"),
        (exlm_cli.load_recipe, ("quickstart-text", "seed=1"), {}, "overrides are 'seed=1', not a list of strings"),
    ]
    for call, arguments, keywords, message in mistakes:
        with pytest.raises(ConfigError, match=message):
            call(*arguments, **keywords)
    assert not out.exists()


def test_a_run_that_cannot_be_loaded_is_named(tmp_path, text_model):
    run = shutil.copytree(text_model, tmp_path / "run")
    (tmp_path / "rum.csv").touch()
    (tmp_path / "rum2").mkdir()
    with pytest.raises(CheckpointError, match="no such run directory") as caught:
        exlm_cli.load(tmp_path / "rum")
    assert caught.value.hint == f"did you mean {run}?"
    (run / "run.json").rename(run / "run.jso")
    with pytest.raises(CheckpointError, match=rf"^{run}: not a run directory: it has no run.json$"):
        exlm_cli.load(run / "checkpoints/step-3")
    with pytest.raises(ConfigError, match="`device` is tpu; it should be 'auto', 'cpu' or 'cuda'"):
        exlm_cli.load(text_model, device="tpu")


def test_questions_on_paragraphs_have_answers_and_margins(text_model, tmp_path):
    """Each seed's margins are what training wrote; answers and probabilities are those of `exlm predict`."""
    folder = squad_run(tmp_path, text_model)
    run = exlm_cli.load(folder, device="cpu")
    pairs = [(text, PARAGRAPHS["Clocks"]) for text, _ in QUESTIONS["Clocks"]]
    found = run.predict([pairs[0], ("Why?", " "), *pairs[1:]])
    assert found.problem.tolist() == ["", "its context is empty", "", ""]
    assert (found.answer[1], np.isnan(found.answer_margin[1])) == ("", True)
    np.testing.assert_allclose(found.no_answer_probability, expit(-found.answer_margin), atol=1e-9)
    out = tmp_path / "out.json"
    predict(
        load_finetuned(folder, device="cpu"), tmp_path / "data" / "dev-v2.0.json", out, folder=tmp_path,
        progress=SilentProgress(),
    )  # fmt: skip
    rows = read_rows(tmp_path / "out-details.csv")
    read = found.iloc[[0, 2, 3]]
    assert [row["answer"] for row in rows] == read.answer.tolist()
    for name in ("answer_margin", "no_answer_probability", "no_answer_seed_spread"):
        np.testing.assert_allclose([float(row[name]) for row in rows], read[name], rtol=1e-4)
    assert len(run.predict([])) == 0
    with pytest.raises(DataError, match="row 1 is 'a', not a tuple of 2 strings"):
        run.predict(["a"])


def test_the_package_gives_every_public_name_and_imports_torch_only_for_one():
    assert exlm_cli.__version__ == metadata.version("exlm-cli")
    assert {"load", "run_pretraining", "states_alignment_nll"} <= set(dir(exlm_cli))
    assert all(getattr(exlm_cli, name) is getattr(alignment, name) for name in alignment.__all__ if "align" in name)
    with pytest.raises(AttributeError, match=r"^module 'exlm_cli' has no attribute 'nothing'$"):
        exlm_cli.nothing  # noqa: B018  # asking for it is the test
    assert all(getattr(exlm_cli, name) is not None and getattr(exlm_cli, name).__doc__ for name in exlm_cli.__all__)
    script = "import sys, exlm_cli; exlm_cli.__version__, exlm_cli.ExlmError, exlm_cli.load_recipe\n"
    script += "assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_one_row_is_read_like_a_list_of_one(text_model, molecules):
    run, smiles = exlm_cli.load(text_model, device="cpu"), exlm_cli.load(molecules, device="cpu")
    np.testing.assert_array_equal(run.embed("amber fern").mean, run.embed(["amber fern"]).mean)
    assert smiles.predict(SMILES[0]).equals(smiles.predict([SMILES[0]]))
    one, (first,) = run.fill("amber [MASK]"), run.fill(["amber [MASK]"])
    assert one._repr_svg_() == render_graph(first, ["svg"])["svg"].decode()
    shown = [f"{100 * one.share(filling):.2g} % {filling.text}" for filling in one.n_best.fillings[:3]]
    assert repr(one) == repr(first) == f"<fillings of 'amber [MASK]': {', '.join(shown)}; 7 more>"


def test_an_array_of_texts_is_filled_as_each_by_itself_and_keeps_its_good_rows(text_model):
    run = exlm_cli.load(text_model, device="cpu")
    texts = ["amber [MASK]", "no mask", "[MASK] fern [MASK] daisy amber", "", "[MASK] [MASK] [MASK]"]
    found = run.fill(np.array(texts))
    assert [filled is None for filled in found] == [bool(problem) for problem in found.problems]
    assert [filled is None for filled in found] == [False, True, False, True, False]
    for text, filled in zip(texts, found, strict=True):
        if filled is not None:
            one = run.fill(text)
            assert [f.text for f in filled.n_best.fillings] == [f.text for f in one.n_best.fillings]
            shares = [filled.share(f) for f in filled.n_best.fillings]
            assert shares == pytest.approx([one.share(f) for f in one.n_best.fillings], rel=1e-4)


def test_seeds_predict_alone_what_training_wrote_of_each(lengths_run):
    """What is calibrated is the mean of all seeds, so some of them have no interval."""
    run = exlm_cli.load(lengths_run, device="cpu")
    table = read_rows(lengths_run.parent / "words.csv")
    test_rows, by_seed_KNC, _ = read_part(lengths_run, "test")
    rows = [table[row]["text"] for row in test_rows]
    for seed, written_NC in zip(run.seeds, by_seed_KNC, strict=True):
        found = run.predict(rows, predictor="model", seeds=[seed])
        np.testing.assert_allclose(found.length_predicted, written_NC[:, 0], rtol=1e-6)
        assert not [name for name in found.columns if "_low_" in name]
        assert f"seeds {seed} alone; the calibration is of all seeds' mean, so it is left out" in found.attrs["notes"]
    assert run.predict(rows, seeds=(2, 1)).equals(run.predict(rows))
    of_each = run.embed(rows, seeds=run.seeds)
    assert [f"seed {seed}" in vectors.notes[1] for seed, vectors in zip(run.seeds, of_each, strict=True)] == [True] * 2
    best = run.seeds.index(run.finished.results.best_seed)
    np.testing.assert_array_equal(of_each[best].mean, run.embed(rows).mean)
    assert np.abs(of_each[0].mean - of_each[1].mean).max() > 1e-4
