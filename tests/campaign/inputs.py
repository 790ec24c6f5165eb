"""Cases of recipes, data files, SMILES, sentences and tables."""

import json
import math
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import yaml

from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.overrides import key_paths
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.sweep import SweepRecipe
from tests.campaign.material import (
    NASTY,
    bring_runs,
    mutate,
    mutate_json,
    mutate_text,
    sentence,
    smiles,
    table_bytes,
    values,
    write_hostile,
)
from tests.campaign.trial import Outcome, Trial
from tests.unit.finetune.finetuned_runs import read_rows

RECIPES = Path(__file__).parents[2] / "recipes"
KINDS = {
    "pretrain": (PretrainRecipe, ("quickstart-text", "text-base", "smiles-small", "quickstart-smiles-mlm")),
    "tokenize": (PretrainRecipe, ("quickstart-text", "text-base")),
    "finetune": (FinetuneRecipe, ("moleculenet-small", "glue-small", "squad-small")),
    "sweep": (SweepRecipe, ("quickstart-ablations", "table-2", "quickstart-repeat-mlm")),
}  # fmt: skip
TASKS = {"moleculenet-small": ("moleculenet", "bace"), "glue-small": ("glue", "rte"), "squad-small": ("squad", "v2")}
FILE_KINDS = ("txt", "csv", "tsv", "jsonl", "json", "parquet")


def recipes(trial: Trial) -> None:
    """A recipe whose values, text or overrides are hostile, resolved by each command that takes one."""
    rng = trial.rng
    command = rng.choice(list(KINDS))
    schema, names = KINDS[command]
    name = rng.choice(names)
    keys = [*key_paths(schema), "nosuch.key", "", ".", "data..train", rng.choice(NASTY)]
    hostile = trial.draw(st.lists(st.tuples(st.sampled_from(keys), values), min_size=1, max_size=3))
    way = rng.randrange(4)
    overrides: list[str] = []
    recipe: str = name
    if way == 0:
        overrides = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in hostile]
    elif way == 1:
        content: dict[str, Any] = {"extends": name}
        for key, value in hostile:
            section, _, leaf = key.rpartition(".")
            content.setdefault(section, {}) if section else None
            inner = content.get(section) if section else content
            if isinstance(inner, dict):
                inner[leaf] = value
        text = yaml.safe_dump(content, allow_unicode=rng.random() < 0.5).encode("utf-8", "surrogatepass")
        recipe = trial.write("mine.yaml", text)
    else:
        shipped = rng.choice(sorted(RECIPES.rglob("*.yaml"))).read_bytes()
        recipe = trial.write("mine.yaml", mutate(rng, shipped))
        overrides = [f"{key}={value}" for key, value in hostile[:1]] if way == 3 else []
    settings = [word for value in overrides for word in ("--set", value)]
    first = {"sweep": [recipe], "finetune": [*TASKS.get(name, ()), "--recipe", recipe]}.get(
        command, ["--recipe", recipe]
    )
    if rng.random() < 0.2 and command == "pretrain":
        trial.exlm("recipes", recipe, *settings, "--json")
        return
    done = trial.exlm(command, *first, *settings, "--dry-run")
    if done.code == 0:
        # what a dry run prints is a recipe that means the same
        trial.write("again.yaml", done.out.encode())
        again = trial.exlm(command, *(w if w != recipe else "again.yaml" for w in first), "--dry-run")
        trial.expect(again.out == done.out, "a resolved recipe resolves to another one")


def words(trial: Trial) -> None:
    """Command lines of known options and hostile values."""
    rng = trial.rng
    bring_runs(trial, "PTM")
    trial.write("a.csv", b"mol,y\nCCO,1\nCCN,0\n")
    commands = ("tokenize", "pretrain", "finetune", "predict", "embed", "inspect-dag", "recipes", "curves", "eval",
                "sweep", "repeat-mlm", "export", "")  # fmt: skip
    options = ("--recipe", "--set", "--out", "--resume", "--seeds", "--seed", "--device", "--checkpoint", "--format",
               "--data-dir", "--smiles-column", "--text-column", "--label-columns", "--split", "--vocab-size", "--kind",
               "--top", "--n-best", "--length", "--json", "--grid", "--gpu", "--gpus", "--mask-ratios", "--data", "-o",
               "--tokenizer", "--num-states", "--entropy", "--variants", "--workers", "--help",
               "--on-invalid")  # fmt: skip
    plain = ("P", "T", "M", "a.csv", "csv", "bace", "glue", "quickstart-text", "1", "0", "cpu", "out", "none", "exact")
    word = st.one_of(st.sampled_from(options), st.sampled_from(plain), st.sampled_from(NASTY), st.text(max_size=12))
    drawn = trial.draw(st.lists(word, max_size=6))
    # no process can be given a NUL, and nothing may be written outside
    drawn = [word.replace("\0", "") for word in drawn if not word.startswith(("/", ".."))]
    command = rng.choice(commands)
    is_trained = command in ("pretrain", "finetune", "sweep", "repeat-mlm")
    trial.exlm(*([command] if command else []), *drawn, *(["--dry-run"] if is_trained else []), may_change=MAY_MAKE)


MAY_MAKE = ("",)
"""A command line may name any file as its output."""


def data(trial: Trial) -> None:
    """A damaged file of each format, packed or not, made into token shards."""
    rng = trial.rng
    is_smiles = rng.random() < 0.4
    kind = rng.choice(FILE_KINDS)
    rows = [[smiles(rng) if is_smiles else sentence(rng), str(i)] for i in range(rng.choice((0, 1, 2, 30, 60)))]
    given = write_hostile(trial, "rows", kind, table_bytes(kind, ["text", "number"], rows))
    invalid = rng.choice(("error", "skip"))
    where: str = given.name
    if rng.random() < 0.1:
        where = rng.choice((".", "*", "./*.*", f"{given.name},{given.name}"))
    settings = ["--set", "data.column=text"] if kind not in ("txt",) and rng.random() < 0.9 else []
    size = [] if is_smiles else ["--vocab-size", 300]
    done = trial.exlm("tokenize", where, "--kind", "smiles" if is_smiles else "text", *size, *settings,
                      "--on-invalid", invalid, "--out", "out", "--json")  # fmt: skip
    if done.code == 0:
        check_shards(trial, done)


def molecules(trial: Trial) -> None:
    """Forty mutated SMILES: each is a sequence or has its line in rejected.csv."""
    rng = trial.rng
    rows = [mutate_text(rng, smiles(rng)).strip() if rng.random() < 0.8 else smiles(rng) for _ in range(40)]
    rows = [row if trial.number % 50 == 0 else row[:400] for row in rows]
    rows = [row for row in rows if row.strip() and row.isprintable() and not row.startswith('"')]
    trial.write("rows.smi", "".join(f"{row}\n" for row in rows).encode("utf-8", "replace"))
    done = trial.exlm("tokenize", "rows.smi", "--kind", "smiles", "--on-invalid", "skip", "--out", "out", "--json")
    if done.code == 0:
        check_shards(trial, done)
        counts = done.result
        found = counts["train_sequences"] + counts["valid_sequences"] + counts["num_rejected"]
        trial.expect(found == len(rows), f"{len(rows)} rows became {found} sequences and rejections")


def check_shards(trial: Trial, done: Outcome) -> None:
    """Check that what was written is as many as the command says."""
    counts = done.result
    trial.expect(counts["train_sequences"] > 0 and counts["train_tokens"] > 0, "shards without a sequence")
    rejected = trial.folder / "out" / "rejected.csv"
    listed = len(read_rows(rejected)) if rejected.exists() else 0
    trial.expect(listed == counts["num_rejected"], f"{counts['num_rejected']} rejected, {listed} listed")


def inspected(trial: Trial) -> None:
    """The DAG of a hostile sentence: probabilities are probabilities, and files are whole."""
    rng = trial.rng
    is_smiles = rng.random() < 0.4
    bring_runs(trial, "PT")
    body = smiles(rng) if is_smiles else sentence(rng)
    pieces = [body, *("[MASK]" for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 5, 8))))]
    rng.shuffle(pieces)
    text = ("" if is_smiles else " ").join(pieces)
    if rng.random() < 0.5:
        text = mutate_text(rng, text) or "[MASK]"
    if rng.random() < 0.01:
        text = " ".join(["[MASK]"] * rng.choice((20, 40)))
    written = rng.choice(("none", "none", "json,dot", "html", "svg"))
    done = trial.exlm("inspect-dag", "--checkpoint", "P" if is_smiles else "T", "--format", written,
                      *(["--out", "out"] if written != "none" else []), "--n-best", rng.choice((1, 3, 10, 100)),
                      "--top", rng.choice((1, 3, 50)), "--length", rng.choice(("exact", "any")), "--json",
                      "--", text)  # fmt: skip
    if done.code == 0:
        dag = done.result
        shares = [filling["probability"] for filling in dag["fillings"]]
        trial.expect(all(0 <= share <= 1 for share in shares) and sum(shares) <= 1 + 1e-6, f"{sum(shares)=}")
        trial.expect(shares == sorted(shares, reverse=True), "fillings are not in order")
        trial.expect(all(0 <= node["occupancy"] <= 1 + 1e-6 for node in dag["nodes"]), "occupancy above 1")
        trial.expect(all((trial.folder / file).stat().st_size for file in dag["files"]), "an empty file")


cells = st.one_of(
    st.sampled_from(("", "0", "1", "0", "1", "active", "no", "1.5", "nan", "1,5", "1e999", "-inf", "?")),
    st.integers(-9, 9).map(str), st.text(max_size=8), st.sampled_from(NASTY),
)  # fmt: skip


def tables(trial: Trial) -> None:
    """Fine-tuning on a hostile table, one tiny epoch."""
    rng = trial.rng
    bring_runs(trial, "PT")
    is_smiles = rng.random() < 0.6
    size = rng.choice((1, 5, 30, 60))
    style = rng.randrange(4)
    odd = trial.draw(st.lists(cells, min_size=6, max_size=6))
    labels = [
        [str(i % 2), rng.choice("abc"), f"{rng.gauss(0, 2):.3f}", rng.choice(odd)][style] if rng.random() < 0.95
        else rng.choice(odd) for i in range(size)
    ]  # fmt: skip
    rows = [[smiles(rng) if is_smiles else sentence(rng), label, str(i)] for i, label in enumerate(labels)]
    kind = rng.choice(("csv", "csv", "tsv"))
    file = write_hostile(trial, "table", kind, table_bytes(kind, ["input", "y", "id"], rows), share_mutated=0.4)
    column = "--smiles-column" if is_smiles else "--text-column"
    done = trial.exlm(
        "finetune", "csv", file.name, column, rng.choice(("input",) * 9 + ("nope",)), "--label-columns",
        rng.choice(("y", "y", "y", "y,id", "nope", "")), "--checkpoint", "P" if is_smiles else "T", "--out", "out",
        "--split", rng.choice(("random", "random", "scaffold", "nope")), "--seeds", "1", "--set", "train.max_epochs=1",
        "--set", "train.batch_sequences=16", "--set", "train.num_threads=1", "--json", "--no-baseline",
    )  # fmt: skip
    if done.code == 0:
        scores = done.result
        losses = [split["loss"]["mean"] for split in scores["metrics"].values()]
        trial.expect(all(loss is None or math.isfinite(loss) for loss in losses), f"losses {losses}")
        for split in ("valid", "test"):
            (predicted,) = (trial.folder / "out").rglob(f"predictions-{split}.csv")
            num_rows = len(read_rows(predicted))
            trial.expect(num_rows == scores["split_sizes"][split], f"{num_rows} predictions for the rows of {split}")


def predicted(trial: Trial) -> None:
    """Predictions and vectors for a hostile file: a row for each row."""
    rng = trial.rng
    run = rng.choice("MMWWRQ")
    bring_runs(trial, "PTMWRQ")
    kind = {"R": "tsv", "Q": "json"}.get(run, rng.choice(("csv", "csv", "tsv")))
    size = rng.choice((0, 1, 3, 40))
    match run:
        case "M":
            content = table_bytes(kind, ["mol", "note"], [[smiles(rng), sentence(rng)] for _ in range(size)])
        case "W":
            content = table_bytes(kind, ["text", "note"], [[sentence(rng), smiles(rng)] for _ in range(size)])
        case "R":
            rows = [[i, sentence(rng), sentence(rng), rng.choice(("entailment", "x"))] for i in range(size)]
            content = table_bytes(kind, ["index", "sentence1", "sentence2", "label"], rows)
        case _:
            document = json.loads((trial.folder / "Q/../data/dev-v2.0.json").resolve().read_text(encoding="utf-8"))
            if rng.random() < 0.7:
                document = mutate_json(rng, document, trial.draw(values))
            content = json.dumps(document).encode()
    file = write_hostile(trial, "new", kind, content, share_mutated=0.5)
    if run != "Q" and rng.random() < 0.3:
        model = {"M": "MP", "W": "WT"}.get(run, "R")
        column = {"M": ["--smiles-column", "mol"], "W": ["--text-column", "text"]}.get(run, [])
        done = trial.exlm("embed", rng.choice(model), file.name, *column, "--out",
                          rng.choice(("v.npz", "v.parquet")), "--json")  # fmt: skip
    else:
        done = trial.exlm("predict", run, file.name, "--out", f"predicted.{kind}", "--json")
    if done.code == 0:
        files = [trial.folder / name for name in done.result["files"]]
        trial.expect(all(path.stat().st_size for path in files), "an empty file of predictions")
        if kind == "csv" and files[0].suffix == ".csv":
            num_rows = len(read_rows(files[0]))
            trial.expect(num_rows == done.result["rows"], f"{done.result['rows']} rows, {num_rows} predictions")
