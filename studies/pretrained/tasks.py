"""The tasks: encoders that are fine-tuned or frozen, forests, and TF-IDF."""

import itertools
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rdkit.Chem import Descriptors
from rdkit.rdBase import BlockLogs
from sklearn.ensemble import RandomForestClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.load import load_recipe
from exlm_cli.data.molecules import fingerprints, parse_molecule
from exlm_cli.finetune.baselines.baseline import NUM_TREES
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.metrics import score_rows
from exlm_cli.tasks.registry import load_task
from exlm_cli.tasks.rows.task import RowTask
from models import Checkpoint, Figures, exlm, load
from record import WORK

SEED = 1
FloatArray = NDArray[np.float64]

MOLECULES = ("bace", "bbbp")
SPLITS = (0, 1, 2)
"""Seeds of the scaffold-balanced splits."""
SETTINGS = {
    "moleculenet": "train.max_epochs=3 train.batch_sequences=16 optim.lr=3e-4 task.canonical_smiles=true "
                   "task.split=scaffold-balanced",
    "sst2": "train.max_epochs=2 train.batch_sequences=32 optim.lr=3e-4 task.max_rows=30000",
    "mrpc": "train.max_epochs=3 train.batch_sequences=16 optim.lr=3e-4",
}  # fmt: skip
"""Fine-tuning of every encoder, beside `moleculenet-small` and `glue-small`."""
RIDGES = tuple(10.0**exponent for exponent in range(-4, 3))
"""Values of C that the validation rows choose from for the vectors of a molecule."""


def settings_of(data: Path, name: str, split: int) -> list[str]:
    """Return the overrides of a task's recipe, the same for every encoder and baseline."""
    suite = suite_of(name)
    own = SETTINGS.get(name, SETTINGS.get(suite, "")).split()
    place = [f"task.data_dir={data / suite}"]
    return [*own, *place, *([f"task.split_seed={split}"] if suite == "moleculenet" else [])]


def suite_of(name: str) -> str:
    """Return the suite of a task."""
    return "moleculenet" if name in MOLECULES else "glue"


def fine_tune(data: Path, name: str, split: int, checkpoint: Checkpoint, *, scratch: bool = False) -> Figures:
    """Fine-tune a model, or its encoder without its weights, and return its scores."""
    suite = suite_of(name)
    out = WORK / f"{name}-{split}-{checkpoint.weights}{'-scratch' if scratch else ''}"
    shutil.rmtree(out, ignore_errors=True)
    sets = itertools.chain.from_iterable(("--set", value) for value in settings_of(data, name, split))
    start = ["--checkpoint", checkpoint.given, *(["--from-scratch"] if scratch else [])]
    chosen = ["--recipe", f"{suite}-small", "--seeds", str(SEED), "--no-baseline", "--device", "cpu"]
    results = exlm("finetune", suite, name, *start, *chosen, *sets, "--out", str(out))
    shutil.rmtree(out)
    metrics = results["metrics"]
    figures = {metric: found["values"][0] for metric, found in metrics.get("test", metrics["valid"]).items()}
    return figures | {"best_epoch": float(results["best_epochs"][0])}


def read_task(data: Path, name: str, split: int) -> RowTask:
    """Return a task whose rows are those that the encoders are fine-tuned on."""
    suite = suite_of(name)
    overrides = [f"task.name={suite}/{name}", *settings_of(data, name, split)]
    task = load_task(load_recipe(f"{suite}-small", overrides, kind=FinetuneRecipe).task, SilentProgress())
    assert isinstance(task, RowTask)
    return task


def molecules_of(task: RowTask) -> dict[str, list[str]]:
    """Return the canonical SMILES of each split."""
    return {split: [smiles for (smiles,) in task.examples[split].texts] for split in task.splits}


def score_forest(read: Callable[[], RowTask], describe: Callable[[Sequence[str]], FloatArray]) -> Figures:
    """Train a random forest on the training rows, and score it on the test rows."""
    task = read()
    features = {split: describe(smiles) for split, smiles in molecules_of(task).items()}
    forest = RandomForestClassifier(NUM_TREES, max_features="sqrt", random_state=SEED, n_jobs=1)
    forest.fit(features["train"], task.examples["train"].targets[:, 0])
    return score_test(task, forest.predict_proba(features["test"])[:, 1])


def ecfp4(smiles: Sequence[str]) -> FloatArray:
    """Return (N, 2048) bits."""
    return fingerprints(smiles).astype(np.float64)


def descriptors(smiles: Sequence[str]) -> FloatArray:
    """Return all of RDKit's 2D descriptors, (N, about 217); 0 where one is not defined."""
    values = np.nan_to_num(np.array(list(map(_descriptors_of, smiles))), nan=0.0, posinf=0.0, neginf=0.0)
    largest = np.finfo(np.float32).max  # trees take float32
    return values.clip(-largest, largest)


@cache
def _descriptors_of(smiles: str) -> FloatArray:
    with BlockLogs():
        return np.array(list(Descriptors.CalcMolDescriptors(parse_molecule(smiles)[0]).values()), dtype=np.float64)


def probe(read: Callable[[], RowTask], checkpoint: Checkpoint) -> Figures:
    """Fit a logistic regression on vectors of an encoder that is not trained further.

    The vectors are the means over the tokens, standardised by the training rows. C is the one that is best on the
    validation rows.
    """
    task = read()
    vectors = {split: load(checkpoint.given).embed(smiles).mean for split, smiles in molecules_of(task).items()}
    targets = {split: task.examples[split].targets[:, 0] for split in task.splits}
    fitted = [
        make_pipeline(StandardScaler(), LogisticRegression(C=c, max_iter=5000)).fit(vectors["train"], targets["train"])
        for c in RIDGES
    ]
    scores = [roc_auc_score(targets["valid"], model.predict_proba(vectors["valid"])[:, 1]) for model in fitted]
    best = fitted[int(np.argmax(scores))]
    return score_test(task, best.predict_proba(vectors["test"])[:, 1])


def score_test(task: RowTask, probability: FloatArray) -> Figures:
    """Return the metrics of a task with one label."""
    return score_rows("binary", probability[:, None], task.examples["test"].targets)


def tf_idf(read: Callable[[], RowTask]) -> Figures:
    """Fit a logistic regression on TF-IDF of words and pairs of words; C by cross-validation on the training rows.

    Two texts become the difference and the product of their vectors.
    """
    task = read()
    texts = {split: list(zip(*task.examples[split].texts, strict=True)) for split in task.splits}
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), min_df=2, sublinear_tf=True, token_pattern=r"(?u)\b\w+\b|[^\w\s]")
    vectorizer.fit(itertools.chain.from_iterable(texts["train"]))

    def features(split: str) -> Any:
        from scipy.sparse import hstack

        first, *others = (vectorizer.transform(column) for column in texts[split])
        if not others:
            return first
        (second,) = others
        return hstack([abs(first - second), first.multiply(second)]).tocsr()

    model = LogisticRegressionCV(
        Cs=[0.3, 1, 3, 10, 30], cv=3, scoring="accuracy", max_iter=1000, use_legacy_attributes=False, l1_ratios=(0,)
    )
    model.fit(features("train"), task.examples["train"].targets[:, 0].astype(int))
    return score_rows("classes", model.predict_proba(features("valid")), task.examples["valid"].targets)
