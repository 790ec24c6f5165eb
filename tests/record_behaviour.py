"""Records what every command writes and prints on tiny inputs, so that a refactoring can be held against it bit by bit.

    python tests/record_behaviour.py record OUT.json     run all commands and write what they made
    python tests/record_behaviour.py compare A.json B.json

Times, paths, versions and commits are left out; weights, metrics, predictions and splits are compared whole.
"""

import csv
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

CLOCK_KEYS = re.compile(
    r"(_s$|_s_per_|tokens_per_s|outside_model_share|^time|^started|^finished|commit|version|platform|python|hostname|"
    r"^pid$|_ms$|identity|relative_cost|relative_time)"
)
SHORT = ["train.max_steps=12", "optim.warmup_steps=3", "data.bundled_rows=1500", "train.validate_every_steps=6",
         "train.validation_sequences=64", "train.checkpoint_every_steps=6", "train.log_every_steps=1",
         "train.num_threads=1", "train.batch_sequences=16", "train.alignment_backend=torch"]  # fmt: skip
FINE = ["train.max_epochs=2", "train.batch_sequences=16", "train.num_threads=1", "seeds=[1,2]"]
FRAGMENTS = ["c1ccccc1", "C1CCCCC1", "c1ccncc1", "C1CCOC1", "c1ccsc1", "C1CCNCC1", "c1ccc2ccccc2c1", "C1CCCC1"]
TAILS = ["", "C", "CC", "O", "CO", "N", "CN", "Cl", "C(=O)O", "C(=O)N", "OC", "CCO", "F", "C#N", "S", "CCl"]


def main(arguments: Sequence[str]) -> int:
    """Record or compare."""
    match arguments:
        case ["record", out]:
            with tempfile.TemporaryDirectory() as folder:
                record = dict(run_all(Path(folder)))
            Path(out).write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
            return 0
        case ["compare", before, after]:
            return compare(*(json.loads(Path(path).read_text(encoding="utf-8")) for path in (before, after)))
    sys.stderr.write(__doc__ or "")
    return 2


def compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Print every leaf that differs; 1 where there is one."""
    then, now = dict(leaves(before)), dict(leaves(after))
    different = [key for key in {**then, **now} if then.get(key) != now.get(key)]
    for key in different:
        print(f"{key}\n  - {str(then.get(key))[:300]}\n  + {str(now.get(key))[:300]}")  # noqa: T201
    print(f"{len(different)} of {len({**then, **now})} values differ")  # noqa: T201
    return bool(different)


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf of nested JSON with its path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{prefix}/{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{prefix}/{index}")
    else:
        yield prefix, value


def run_all(root: Path) -> Iterator[tuple[str, Any]]:
    """Yield the name and the record of every step."""
    write_data(root)
    for name in ("text", "text-mlm", "smiles", "smiles-mlm"):
        yield from step(root, name, ["pretrain", "--recipe", f"quickstart-{name}", "--json"], SHORT, out=name)
    yield from step(root, "own-text", ["tokenize", "texts.txt", "--kind", "text", "--vocab-size", "300", "--json"],
                    ["tokenizer.min_frequency=1"], out="own-text")  # fmt: skip
    yield from finetunings(root)
    yield from grids(root)
    yield from looks(root)


def finetunings(root: Path) -> Iterator[tuple[str, Any]]:
    """Yield one tiny fine-tuning of each suite, and of each kind of label."""
    text, smiles = ["--checkpoint", "text"], ["--checkpoint", "smiles"]
    yield from step(root, "bace", ["finetune", "moleculenet", "bace", "--data-dir", ".", *smiles, "--baseline",
                                   "--recipe", "moleculenet-small", "--json"], FINE, out="bace")  # fmt: skip
    yield from step(root, "rte", ["finetune", "glue", "rte", "--data-dir", "glue", *text, "--recipe", "glue-small",
                                  "--json"], FINE, out="rte")  # fmt: skip
    yield from step(root, "squad", ["finetune", "squad", "v2", "--data-dir", "squad", *text, "--recipe", "squad-small",
                                    "--json"], [*FINE, "task.sequence_length=32", "task.doc_stride=8",
                                                "task.max_query_tokens=10"], out="squad-run")  # fmt: skip
    for name, label in (("classes", "kind"), ("regression", "value"), ("labels", "oxygen,nitrogen")):
        yield from step(root, f"csv-{name}", ["finetune", "csv", "assay.csv", "--smiles-column", "smiles",
                                              "--label-columns", label, *smiles, "--json"], FINE,
                        out=f"csv-{name}")  # fmt: skip
    yield from step(root, "csv-text", ["finetune", "csv", "moods.csv", "--text-column", "text", "--label-columns",
                                       "mood", *text, "--json"], FINE, out="csv-text")  # fmt: skip
    yield from step(root, "csv-grid", ["finetune", "csv", "assay.csv", "--label-columns", "oxygen", *smiles, "--grid",
                                       "--json"], [*FINE, "seeds=[1]", "grid.optim.lr=[1e-4, 3e-4]"],
                    out="csv-grid")  # fmt: skip


def grids(root: Path) -> Iterator[tuple[str, Any]]:
    """Yield a Repeated-MLM grid and a sweep."""
    short = [f"pretrain.{value}" for value in SHORT if "alignment" not in value]
    yield from step(root, "grid", ["repeat-mlm", "--recipe", "quickstart-repeat-mlm", "--num-repeats", "1,2",
                                   "--mask-ratios", "0.387,0.622", "--task", "glue/rte", "--jobs", "2", "--json"],
                    [*short, "finetune.task.data_dir=glue", "finetune.train.max_epochs=1",
                     "finetune.train.batch_sequences=8", "finetune.seeds=[1]"], out="grid")  # fmt: skip
    yield from step(root, "sweep", SWEEP, [*(f"pretrain.{value}" for value in SHORT), "measure_sequences=32",
                                           "only=[mlm,exlm,exlm-no-transitions]"], out="sweep")  # fmt: skip


SWEEP = ["sweep", "quickstart-ablations", "--jobs", "2", "--json"]
PREDICT = ["predict", "{run}", "{file}", "--out", "{out}", "--json"]
EMBED = ["embed", "{run}", "{file}", "--out", "{out}", "--json"]


def looks(root: Path) -> Iterator[tuple[str, Any]]:
    """Yield what the commands say that only look at runs."""
    yield from step(root, "eval-pretrained", ["eval", "text", "text-mlm", "--json"])
    yield from step(root, "eval-finetuned", ["eval", "bace", "csv-labels", "--format", "markdown,csv,latex", "--json",
                                             "--out", "tables"], files="tables")  # fmt: skip
    yield from step(
        root, "eval-glue", ["eval", "rte", "squad-run", "--json", "--out", "tables-text"], files="tables-text"
    )
    yield from step(root, "eval-entropy", ["eval", "--entropy", "text", "text-mlm", "--mask-ratios", "0.15,0.5",
                                           "--json", "--out", "entropy"], files="entropy")  # fmt: skip
    for run, file in (
        ("bace", "bace.csv"),
        ("csv-classes", "assay.csv"),
        ("csv-regression", "assay.csv"),
        ("csv-text", "moods.csv"),
        ("rte", "glue/RTE/dev.tsv"),
        ("squad-run", "squad/dev-v2.0.json"),
    ):
        suffix = {"squad-run": "json", "rte": "tsv"}.get(run, "csv")
        words = [w.format(run=run, file=file, out=f"applied/{run}.{suffix}") for w in PREDICT]
        yield from step(root, f"predict-{run}", words, files="applied", only=run)
    for run, file in (("smiles", "assay.csv"), ("csv-classes", "assay.csv"), ("text", "moods.csv")):
        words = [w.format(run=run, file=file, out=f"vectors/{run}.npz") for w in EMBED]
        yield from step(root, f"embed-{run}", words, files="vectors", only=run)
    sentence = "This is [MASK], and I'm very [MASK] to see this."
    for length in ("exact", "any"):
        yield from step(root, f"dag-{length}", ["inspect-dag", sentence, "--checkpoint", "text", "--length", length,
                                                "--n-best", "5", "--out", f"dag-{length}", "--format", "json,dot",
                                                "--json"], files=f"dag-{length}")  # fmt: skip
    yield from step(root, "recipes", ["recipes", "--json"])
    yield from step(root, "recipe", ["recipes", "text-base", "--json"])
    yield from step(root, "curves", ["curves", "text", "text-mlm", "--json", "--out", "curves"])


def step(
    root: Path,
    name: str,
    words: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    out: str | None = None,
    files: str | None = None,
    only: str = "",
) -> Iterator[tuple[str, Any]]:
    """Run a command in `root` and yield what it printed as JSON and the files it made."""
    command = ["exlm", *words, *(part for value in overrides for part in ("--set", value))]
    environment = os.environ | {"EXLM_CACHE_DIR": str(root / "cache"), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        [*command, *(("--out", out) if out else ())],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    print(f"{name}: exit {done.returncode}", file=sys.stderr)  # noqa: T201
    record: dict[str, Any] = {"exit": done.returncode}
    if done.returncode not in (0, 1):
        record["stderr"] = done.stderr.replace(str(root), "ROOT")
        print(done.stderr, file=sys.stderr)  # noqa: T201
    else:
        record["printed"] = clean(json.loads(done.stdout), root)
        folder = root / (out or files or "nothing")
        record["files"] = {
            str(path.relative_to(folder)): shown
            for path in sorted(folder.rglob("*"))
            if only in path.name and path.is_file() and (shown := content(path, root)) is not None
        }
    yield name, record


def content(path: Path, root: Path) -> Any:
    """Return what a file holds that must stay; None for files that need not."""
    match path.suffix:
        case ".safetensors" | ".npz":
            return {"sha256": digest(path)} if path.suffix == ".safetensors" else arrays(path)
        case ".csv":
            with path.open(newline="", encoding="utf-8") as stream:
                rows = list(csv.reader(stream))
            clocks = {i for i, name in enumerate(rows[0]) if CLOCK_KEYS.search(name)} if rows else set()
            return [[cell for i, cell in enumerate(row) if i not in clocks] for row in rows]
        case ".jsonl":
            return [clean(json.loads(line), root) for line in path.read_text(encoding="utf-8").splitlines()]
        case ".json" if path.name not in ("state.json", "manifest.json", "run.json"):
            return clean(json.loads(path.read_text(encoding="utf-8")), root)
        case ".dot" | ".md" | ".tex" | ".tsv":
            text = path.read_text(encoding="utf-8").replace(str(root), "ROOT")
            return re.sub(r"\d+:\d\d:\d\d", "TIME", text).splitlines()
    return None


def arrays(path: Path) -> dict[str, str]:
    """Return a digest of each array of an archive: the archive itself holds the time."""
    import numpy as np

    with np.load(path, allow_pickle=False) as archive:
        return {key: hashlib.sha256(archive[key].tobytes()).hexdigest() for key in archive.files}


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def clean(value: Any, root: Path) -> Any:
    """Return JSON without what a clock, a path or an installation decides."""
    if isinstance(value, dict):
        return {key: clean(inner, root) for key, inner in value.items() if not CLOCK_KEYS.search(key)}
    if isinstance(value, list):
        return [clean(inner, root) for inner in value]
    return value.replace(str(root), "ROOT") if isinstance(value, str) else value


def write_data(root: Path) -> None:
    """Write molecules, sentences, RTE and SQuAD in their own layouts."""
    smiles = [f"{first}{tail}" if first[0] == "c" else f"{tail}{first}" for first in FRAGMENTS for tail in TAILS]
    smiles = [text for text in smiles if not text.startswith("=")]
    write_csv(root / "bace.csv", ["mol", "Class"], [(text, int("O" in text)) for text in smiles])
    rows = [(i, text, "acid" if "(=O)O" in text else "halide" if "Cl" in text or "F" in text else "other",
             len(text) / 7 + text.count("N"), int("O" in text), "" if i % 5 == 0 else int("N" in text))
            for i, text in enumerate(smiles)]  # fmt: skip
    rows += [(998, "C1CC", "other", 1.0, 0, 0), (999, "not a molecule", "acid", 2.0, 1, 1)]
    write_csv(root / "assay.csv", ["id", "smiles", "kind", "value", "oxygen", "nitrogen"], rows)
    moods = [(f"This is {word}, and I'm very {mood} to see this number {i}.", mood)
             for i in range(12) for word, mood in (("great", "glad"), ("awful", "sad"), ("odd", "amused"))]  # fmt: skip
    write_csv(root / "moods.csv", ["text", "mood"], moods)
    (root / "texts.txt").write_text("".join(f"{text}\n" for text, _ in moods), encoding="utf-8")
    rte = root / "glue" / "RTE"
    rte.mkdir(parents=True)
    for name, size in (("train", 40), ("dev", 16)):
        lines = [f"{i}\tThe cat {i} sat on mat {i % 7}.\tA cat sat on mat {i % 5}.\t"
                 f"{'entailment' if i % 7 == i % 5 else 'not_entailment'}" for i in range(size)]  # fmt: skip
        text = "\n".join(["index\tsentence1\tsentence2\tlabel", *lines])
        (rte / f"{name}.tsv").write_text(f"{text}\n", encoding="utf-8")
    (root / "squad").mkdir()
    for name, size in (("train", 8), ("dev", 4)):
        articles = [article(i) for i in range(size)]
        text = json.dumps({"version": "v2.0", "data": articles})
        (root / "squad" / f"{name}-v2.0.json").write_text(text, encoding="utf-8")


def article(number: int) -> dict[str, Any]:
    """Return an article of SQuAD with an answerable question and one that has no answer."""
    place = ["Lund", "Malmo", "Ystad", "Umea"][number % 4]
    context = f"The ferry number {number} leaves {place} at dawn. It is red and carries {number + 3} cars."
    known = {"id": f"{number}-a", "question": f"Where does ferry {number} leave?", "is_impossible": False,
             "answers": [{"text": place, "answer_start": context.index(place)}]}  # fmt: skip
    unknown = {"id": f"{number}-b", "question": "Who built the ferry?", "is_impossible": True, "answers": []}
    return {"title": f"Ferry {number}", "paragraphs": [{"context": context, "qas": [known, unknown]}]}


def write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Write a table."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
