"""Study of what the two bundled models are worth: next to no pre-training, to an MLM, and to methods without a network.

    export PYTHONPATH=studies
    python studies/pretrained/worth.py DATA --text bundled:text --smiles bundled:smiles --smiles-twin RUN
    python studies/pretrained/worth.py DATA ... --only bace bbbp
    python studies/pretrained/worth.py DATA ... --list
    python studies/pretrained/worth.py --table

DATA is the folder of shared data: `text/`, `smiles/`, `glue/` and `moleculenet/`. A cell is one data set, one method
and one split; its figures are rows of `results/worth.csv`, and a cell that has them is not done again. Every process
works on one thread and takes the next cell that no other works on, so start the command twice for two cores. Cells of a
model carry the hash of its weights. `--table` prints the tables of what is done, `--list` what is left.

Every encoder is fine-tuned with the same settings, those below. The words that fill masks, and the sentences of
`clozes.yaml`, are in `results/worth_fillings.csv`.
"""

import argparse
import contextlib
import fcntl
import hashlib
import itertools
import json
import lzma
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from rdkit.Chem import Descriptors
from rdkit.rdBase import BlockLogs
from sklearn.ensemble import RandomForestClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import exlm_cli
from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.load import load_recipe
from exlm_cli.dag.graph import Dag
from exlm_cli.dag.inspection import Inspection
from exlm_cli.data.descriptors import fingerprints
from exlm_cli.data.molecules import parse_molecule
from exlm_cli.errors import ExlmError
from exlm_cli.finetune.baselines.baseline import NUM_TREES
from exlm_cli.ops.alignment import states_alignment_nll
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.metrics import score_rows
from exlm_cli.tasks.registry import load_task
from exlm_cli.tasks.rows.task import RowTask
from rows import append_row, mean_and_half, read_rows, surroundings

NAME, FILLINGS = "worth", "worth_fillings"
WORK = Path("runs") / NAME
ROWS = WORK / "rows"
"""Held by the process that writes rows."""
CLOZES = Path(__file__).parent / "clozes.yaml"

SEED = 1
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
VALIDATION = {
    "wikipedia": "text/wikipedia_en_valid.txt.xz",
    "gutenberg": "text/gutenberg_en_valid.txt.xz",
    "smiles": "smiles/valid.txt.xz",
}
TRAINING = {
    "wikipedia": ("text/wikipedia_en_train.txt.xz", "text/gutenberg_en_train.txt.xz"),
    "gutenberg": ("text/wikipedia_en_train.txt.xz", "text/gutenberg_en_train.txt.xz"),
    "smiles": ("smiles/train.txt.xz",),
}
"""Files that unigrams are counted on."""
MAX_LINES = 60_000
"""Lines of each of them that are read."""
MAX_SEQUENCES = 2048
"""Sequences of a validation file that are scored, evenly spread."""
OWN = "own"
"""The mask ratio that a model was trained with."""
MASK_RATIO = "0.15"
NUM_WORDS = 5
SEPARATOR = " | "
"""Between the fillings of a row."""
RIDGES = tuple(10.0**exponent for exponent in range(-4, 3))
"""Values of C that the validation rows choose from for the vectors of a molecule."""

MODEL, TWIN, SCRATCH = "ExLM", "MLM twin", "from scratch"
Figures = dict[str, float]
Models = Mapping[str, "Checkpoint"]
"""Models by method; the first is MODEL."""
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Checkpoint:
    """A model as it was given, and the first letters of the hash of its weights."""

    given: str
    weights: str


@dataclass(frozen=True)
class Cell:
    """One data set, method and split, and how its figures are found."""

    data: str
    method: str
    split: str
    weights: str
    find: Callable[[], Figures]

    @property
    def key(self) -> tuple[str, ...]:
        """What it has in its rows."""
        return (self.data, self.method, self.split, self.weights)

    def __str__(self) -> str:
        """Return its key as a line shows it."""
        return " · ".join(filter(None, self.key))

    @property
    def lock(self) -> Path:
        """The file that the process that works on it holds."""
        return WORK / "_".join(self.key).replace(" ", "-")


# --- models ---------------------------------------------------------------------------------------------------------


@cache
def load(given: str) -> exlm_cli.Run:
    """Return a pre-trained model; each is read once."""
    return exlm_cli.load(given, device="cpu")


def checkpoint_of(given: str) -> Checkpoint:
    """Return a model with the hash of its encoder's weights, the same for every copy of them."""
    encoder = load(given).encoder.runner.model.state_dict()
    digest = hashlib.sha256()
    for name, weights in sorted(encoder.items()):
        if not name.startswith("head."):
            digest.update(name.encode() + weights.float().numpy().tobytes())
    return Checkpoint(given, digest.hexdigest()[:8])


def exlm(*arguments: str) -> Any:
    """Run a command on one thread and return the JSON that it prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "exlm_cli", *arguments, "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    return json.loads(done.stdout)


# --- masked tokens --------------------------------------------------------------------------------------------------


def masked_tokens(data: Path, name: str, checkpoint: Checkpoint, ratio: str) -> Figures:
    """Return loss, accuracy and entropy over masked tokens of a validation file."""
    scored = ["--data", str(data / VALIDATION[name]), "--max-sequences", str(MAX_SEQUENCES), "--no-figures"]
    scored += ["--on-invalid", "skip"] if name == "smiles" else []  # molecules that are longer than a sequence
    if ratio == OWN:
        metrics = exlm("eval", checkpoint.given, *scored)["metrics"]
    else:
        (entropy,) = exlm("eval", checkpoint.given, "--entropy", "--mask-ratios", ratio, *scored)["entropies"]
        metrics = entropy["metrics"]
    wanted = ("loss_given_length", "mask_accuracy", "entropy_bits", "effective_states")
    return {metric: metrics[metric] for metric in wanted if metric in metrics}


def unigrams(data: Path, name: str, checkpoint: Checkpoint) -> Figures:
    """Return loss, accuracy and entropy of the frequencies of tokens in training, over all tokens of a file."""
    tokenizer = load(checkpoint.given).encoder.tokenizer

    def count(path: Path, max_lines: int | None) -> NDArray[np.int64]:
        counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
        with lzma.open(path, "rt", encoding="utf-8") as file:
            lines = (line.rstrip("\n") for line in itertools.islice(file, max_lines))
            while part := list(itertools.islice(lines, 1000)):
                tokens = itertools.chain.from_iterable(tokenizer.encode_batch(part))
                counts += np.bincount(np.fromiter(tokens, dtype=np.int64), minlength=len(counts))
        return counts

    frequency = 1.0 + sum(count(data / path, MAX_LINES) for path in TRAINING[name])
    frequency /= frequency.sum()
    seen = count(data / VALIDATION[name], None)
    return {
        "loss_given_length": float(-(seen @ np.log(frequency)) / seen.sum()),
        "mask_accuracy": float(seen[frequency.argmax()] / seen.sum()),
        "entropy_bits": float(-(frequency @ np.log2(frequency))),
    }


# --- sentences with masks -------------------------------------------------------------------------------------------


def fill_clozes(checkpoint: Checkpoint, method: str) -> Figures:
    """Fill the sentences with one mask; return how many have an accepted word among the likeliest."""
    sentences = _sentences("singles")
    num_found = num_first = 0
    for sentence in sentences:
        inspection = load(checkpoint.given).fill(sentence["text"], num_fillings=NUM_WORDS)
        best = inspection.n_best.fillings
        words = [inspection.filled_words(filling)[0] for filling in best]
        accepted = {_plain(word) for word in sentence["accepted"]}
        found = [_plain(word) in accepted for word in words]
        num_found, num_first = num_found + any(found), num_first + found[0]
        shown = [f"{word} {inspection.share(filling):.2f}" for word, filling in zip(words, best, strict=True)]
        _record(method, checkpoint, sentence["text"], SEPARATOR.join(shown), accepted=any(found))
    return {"num_sentences": len(sentences), "accepted_among_five": num_found, "accepted_first": num_first}


def fill_pairs(checkpoint: Checkpoint, method: str) -> Figures:
    """Fill the sentences with two masks, jointly and each mask by itself.

    `joint_accepted` counts the sentences whose likeliest joint filling is accepted, `independent_accepted` those whose
    masks, each filled with its own likeliest word, are. `prefers` counts those in which the two fillings `mixed` are
    together likelier than their crossings, among the `num_odds` whose words are single tokens: masks that are
    independent give odds of 1, whatever the words are.
    """
    sentences = _sentences("pairs")
    counts: Counter[str] = Counter(num_sentences=len(sentences))
    odds = []
    for sentence in sentences:
        inspection = load(checkpoint.given).fill(sentence["text"], num_fillings=NUM_WORDS)
        accepted = {tuple(map(_plain, words)) for words in sentence["accepted"]}

        def is_accepted(words: Iterable[str], accepted: set[tuple[str, ...]] = accepted) -> bool:
            return tuple(map(_plain, words)) in accepted

        best = [inspection.filled_words(filling) for filling in inspection.n_best.fillings]
        guess = inspection.filled_words(inspection.guess.filling)
        counts["joint_accepted"] += is_accepted(best[0])
        counts["joint_among_five"] += any(map(is_accepted, best))
        counts["independent_accepted"] += is_accepted(guess)
        counts["guess_is_another"] += best[0] != guess
        log_odds = mixed_log_odds(inspection.dag, sentence["mixed"])
        if log_odds is not None:
            odds.append(log_odds)
        _record(
            method,
            checkpoint,
            sentence["text"],
            SEPARATOR.join(
                f"{' … '.join(words)} {inspection.share(filling):.3f}"
                for words, filling in zip(best, inspection.n_best.fillings, strict=True)
            ),
            accepted=is_accepted(best[0]),
            independent=_shown_guess(inspection, guess),
            independent_accepted=is_accepted(guess),
            log_odds="" if log_odds is None else f"{log_odds:.3f}",
        )
    figures = {name: float(count) for name, count in counts.items()}
    if odds:
        figures |= {"num_odds": float(len(odds)), "prefers": float(sum(o > 1e-6 for o in odds))}
        figures["mean_log_odds"] = float(np.mean(odds))
    return figures


def mixed_log_odds(dag: Dag, mixed: Sequence[Sequence[str]]) -> float | None:
    """Return log P(a, b) P(c, d) - log P(a, d) P(c, b) of two fillings (a, b) and (c, d); None for words of two tokens.

    P is the joint probability given T tokens. The odds are 1 if the masks are independent.
    """
    (a, b), (c, d) = mixed
    pairs = [(a, b), (c, d), (a, d), (c, b)]
    log_probs = dag.node_log_probs.T  # (V, S)
    tokens = {word: _tokens_of(dag, word) for word in {a, b, c, d}}
    if not all(tokens.values()):
        return None
    emissions = {word: np.logaddexp.reduce(log_probs[ids], axis=0) for word, ids in tokens.items()}
    log_emit = torch.from_numpy(np.array([[emissions[word] for word in pair] for pair in pairs]))
    # the ends emit nothing
    log_emit = log_emit.where(torch.from_numpy(dag.node_mask >= 0), -torch.inf)
    log_trans = torch.from_numpy(dag.log_trans).expand(len(pairs), -1, -1)
    lengths = torch.full((len(pairs),), 2), torch.full((len(pairs),), dag.num_nodes)
    nll = states_alignment_nll(log_emit, log_trans, *lengths).tolist()
    return float(nll[2] + nll[3] - nll[0] - nll[1])


def _tokens_of(dag: Dag, word: str) -> list[int]:
    """Return the single tokens that read as a word, with a blank before it and without."""
    spelled = (dag.tokenizer.encode(f"{blank}{word}") for blank in ("", " "))
    return [ids[0] for ids in spelled if len(ids) == 1]


def _shown_guess(inspection: Inspection, guess: Sequence[str]) -> str:
    joint, alone = inspection.share(inspection.guess.filling), inspection.guess.prob_independent
    return f"{' … '.join(guess)} {joint:.3f}, {alone:.3f} if independent"


def _sentences(kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load(CLOZES.read_text(encoding="utf-8"))[kind]
    return found


def _plain(word: str) -> str:
    return word.strip().lower()


def _record(
    method: str,
    checkpoint: Checkpoint,
    text: str,
    fillings: str,
    *,
    accepted: bool,
    independent: str = "",
    independent_accepted: bool | str = "",
    log_odds: str = "",
) -> None:
    row = {
        "method": method,
        "weights": checkpoint.weights,
        "text": text,
        "fillings": fillings,
        "accepted": accepted,
        "independent": independent,
        "independent_accepted": independent_accepted,
        "log_odds": log_odds,
    }
    with locked(ROWS):
        append_row(FILLINGS, row | _where())


# --- tasks ----------------------------------------------------------------------------------------------------------


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


# --- cells ----------------------------------------------------------------------------------------------------------


def cells_of(data: Path, text: Models, smiles: Models) -> Iterator[Cell]:
    """Yield all cells of the models that were given, the quick ones first."""
    for method, of in text.items():
        yield Cell("clozes", method, "", of.weights, partial(fill_clozes, of, method))
        yield Cell("pairs", method, "", of.weights, partial(fill_pairs, of, method))
    yield from _masked_cells(data, text, ("wikipedia", "gutenberg"))
    yield from _masked_cells(data, smiles, ("smiles",))
    tasks = [(name, split) for split in SPLITS for name in MOLECULES] if smiles else []
    for name, split in tasks:
        read = partial(read_task, data, name, split)
        yield Cell(name, "forest on ECFP4", str(split), "", partial(score_forest, read, ecfp4))
        yield Cell(name, "forest on RDKit's descriptors", str(split), "", partial(score_forest, read, descriptors))
        for method, of in smiles.items():
            yield Cell(name, f"{method}, frozen", str(split), of.weights, partial(probe, read, of))
    sentences = ("sst2", "mrpc") if text else ()
    for name in sentences:
        yield Cell(name, "TF-IDF, logistic regression", "", "", partial(tf_idf, partial(read_task, data, name, 0)))
    for name in sentences:
        yield from _fine_tuned(data, name, 0, text)
    for name, split in tasks:
        yield from _fine_tuned(data, name, split, smiles)


def _masked_cells(data: Path, models: Models, names: Sequence[str]) -> Iterator[Cell]:
    for name in names if models else ():
        first = models[MODEL]
        yield Cell(name, "unigrams", "", first.weights, partial(unigrams, data, name, first))
        for ratio, (method, of) in itertools.product((OWN, MASK_RATIO), models.items()):
            yield Cell(name, method, ratio, of.weights, partial(masked_tokens, data, name, of, ratio))


def _fine_tuned(data: Path, name: str, split: int, models: Models) -> Iterator[Cell]:
    first, shown = models[MODEL], str(split) if name in MOLECULES else ""
    for method, of in models.items():
        yield Cell(name, method, shown, of.weights, partial(fine_tune, data, name, split, of))
    yield Cell(name, SCRATCH, shown, first.weights, partial(fine_tune, data, name, split, first, scratch=True))


@contextlib.contextmanager
def locked(path: Path, *, waits: bool = True) -> Iterator[bool]:
    """Hold a file until no other process does, or say that one does; the system lets go of it when a process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def done_cells() -> set[tuple[str, ...]]:
    """Return the keys of the cells that have rows."""
    return {(row["data"], row["method"], row["split"], row["weights"]) for row in read_rows(NAME)}


@cache
def _where() -> dict[str, str]:
    return surroundings(torch.device("cpu"))


def work(cells: Sequence[Cell]) -> list[Cell]:
    """Do every cell that is not done and that no other process works on; return those that failed."""
    failed = []
    for cell in cells:
        with locked(cell.lock, waits=False) as is_ours:
            if not is_ours or cell.key in done_cells():
                continue
            began = time.perf_counter()
            try:
                figures = cell.find()
            except (ExlmError, RuntimeError) as error:
                sys.stderr.write(f"{cell}: {error}\n")
                failed.append(cell)
                continue
            seconds = f"{time.perf_counter() - began:.1f}"
            keys = dict(zip(("data", "method", "split", "weights"), cell.key, strict=True))
            with locked(ROWS):
                for metric, value in figures.items():
                    append_row(NAME, keys | {"metric": metric, "value": f"{value:.5f}", "seconds": seconds} | _where())
            sys.stderr.write(f"{cell}: {seconds} s, {figures}\n")
    return failed


# --- tables ---------------------------------------------------------------------------------------------------------


def table() -> str:
    """Return the tables of all rows; of rows for the same cell, the last ones count."""
    figures: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in read_rows(NAME):
        figures.setdefault((row["data"], row["method"], row["split"]), {})[row["metric"]] = float(row["value"])
    lines: list[str] = []
    lines += _masked_table(figures)
    lines += _task_table(figures, MOLECULES, "roc_auc", "test ROC-AUC, %, scaffold-balanced splits")
    lines += _task_table(figures, ("sst2", "mrpc"), "accuracy", "accuracy on the development set, %, one seed")
    lines += _fillings_table(figures)
    lines += _claims(figures)
    return "\n".join(lines)


Found = Mapping[tuple[str, str, str], Mapping[str, float]]


def _masked_table(found: Found) -> list[str]:
    lines = ["", "masked tokens", "", "| file | p | method | loss given T | accuracy | entropy, bits |"]
    lines += ["|---|---|---|---|---|---|"]
    for (data, method, split), of in found.items():
        if data in VALIDATION:
            shown = [
                f"{of['loss_given_length']:.3f}",
                f"{100 * of['mask_accuracy']:.1f} %",
                f"{of['entropy_bits']:.2f}",
            ]
            lines.append(f"| {data} | {split} | {method} | {' | '.join(shown)} |")
    return lines


def _task_table(found: Found, names: Sequence[str], metric: str, title: str) -> list[str]:
    methods = list(dict.fromkeys(method for data, method, _ in found if data in names))
    lines = ["", title, "", f"| method | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for method in methods:
        shown = []
        for name in names:
            values = [100 * of[metric] for (data, m, _), of in found.items() if (data, m) == (name, method)]
            less = _differences(found, name, method, metric)
            shown.append(f"{_with_spread(values)}{f'; ExLM less this {less}' if less else ''}")
        lines.append(f"| {method} | {' | '.join(shown)} |")
    return lines


def _with_spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = f" ({', '.join(f'{value:.1f}' for value in values)})" if len(values) > 1 else ""
    return f"{np.mean(values):.1f}{spread}"


def _differences(found: Found, name: str, method: str, metric: str) -> str:
    """Return fine-tuned ExLM less a method on the same splits, in points, with its 95 % interval over splits."""
    pairs = [
        (of[metric], found[name, MODEL, split][metric])
        for (data, m, split), of in found.items()
        if (data, m) == (name, method) and (name, MODEL, split) in found
    ]
    if method == MODEL or not pairs:
        return ""
    gaps = [100 * (model - other) for other, model in pairs]
    if len(gaps) < 2:
        return f"{gaps[0]:+.1f}"
    return "{:+.1f} ± {:.1f}".format(*mean_and_half(gaps))


def _fillings_table(found: Found) -> list[str]:
    lines = []
    for (data, method, _), of in found.items():
        if data in ("clozes", "pairs"):
            listed = ", ".join(f"{name} {value:g}" for name, value in of.items())
            lines += ["", f"{data}, {method}: {listed}"]
    rows = {(row["method"], row["text"]): row for row in read_rows(FILLINGS)}
    for method in dict.fromkeys(of for of, _ in rows):
        lines += ["", f"| one mask, {method} | likeliest words | accepted |", "|---|---|---|"]
        for row in _rows_of(rows, method, "singles"):
            lines.append(f"| {row['text']} | {_in_cell(row['fillings'])} | {_YES[row['accepted']]} |")
        lines += ["", f"| two masks, {method} | likeliest together | accepted | each by itself | accepted | log odds |"]
        lines += ["|---|---|---|---|---|---|"]
        for row in _rows_of(rows, method, "pairs"):
            joint = f"{_in_cell(row['fillings'])} | {_YES[row['accepted']]}"
            alone = f"{_in_cell(row['independent'])} | {_YES[row['independent_accepted']]}"
            lines.append(f"| {row['text']} | {joint} | {alone} | {row['log_odds']} |")
    return lines


_YES = {"True": "yes", "False": "no"}


def _rows_of(rows: Mapping[tuple[str, str], dict[str, str]], method: str, kind: str) -> list[dict[str, str]]:
    """Return the rows of a model in the order of the sentences."""
    return [rows[method, s["text"]] for s in _sentences(kind) if (method, s["text"]) in rows]


def _in_cell(text: str) -> str:
    return text.replace(SEPARATOR, "; ").replace("|", "\\|")


def _claims(found: Found) -> list[str]:
    """Return rows for C3 and C9 of docs/results.md: fine-tuned and entropy, ExLM less its twin."""
    lines = []
    parts = [f"{name.upper()} {less}" for name in MOLECULES if (less := _differences(found, name, TWIN, "roc_auc"))]
    if parts:
        lines += ["", f"C3, points of ROC-AUC, ExLM less its MLM twin, one pre-training: {', '.join(parts)}"]
    for data in VALIDATION:
        model, twin = found.get((data, MODEL, OWN)), found.get((data, TWIN, OWN))
        if model and twin:
            gaps = {key: model[key] - twin[key] for key in ("loss_given_length", "entropy_bits")}
            lines += [
                "",
                f"C5 and C9 on {data}, at the recipe's mask ratio: loss given T {model['loss_given_length']:.3f} "
                f"against {twin['loss_given_length']:.3f} nats ({gaps['loss_given_length']:+.3f}); entropy "
                f"{model['entropy_bits']:.2f} against {twin['entropy_bits']:.2f} bits ({gaps['entropy_bits']:+.3f})",
            ]
    return lines


def main() -> None:
    """Do the cells, list them, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--text", help="text model: bundled:text or a run")
    parser.add_argument("--text-twin", help="its MLM twin, a run")
    parser.add_argument("--smiles", help="model of molecules: bundled:smiles or a run")
    parser.add_argument("--smiles-twin", help="its MLM twin, a run")
    parser.add_argument("--only", nargs="+", help="data of the cells: clozes, pairs, wikipedia, ..., bace, bbbp")
    parser.add_argument("--list", action="store_true", help="print the cells and whether they are done")
    parser.add_argument("--table", action="store_true", help="print the tables of what is done")
    given = parser.parse_args()
    if given.table:
        sys.stdout.write(table() + "\n")
        return
    if given.data is None:
        parser.error("DATA is missing")
    for twin, model in ((given.text_twin, given.text), (given.smiles_twin, given.smiles)):
        if twin and not model:
            parser.error("a twin is given without its model")
    torch.set_num_threads(1)
    text, smiles = (
        {method: checkpoint_of(name) for method, name in ((MODEL, model), (TWIN, twin)) if name}
        for model, twin in ((given.text, given.text_twin), (given.smiles, given.smiles_twin))
    )
    cells = [cell for cell in cells_of(given.data.resolve(), text, smiles) if cell.data in (given.only or [cell.data])]
    if given.list:
        done = done_cells()
        for cell in cells:
            sys.stdout.write(f"{'done' if cell.key in done else '    '} {cell}\n")
        return
    if failed := work(cells):
        sys.exit(f"failed: {', '.join(map(str, failed))}")


if __name__ == "__main__":
    main()
