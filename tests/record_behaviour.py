"""Records what every command writes and prints on tiny inputs, so that a refactoring can be held against it bit by bit.

    python -m tests.record_behaviour record OUT.json     run all commands and write what they made
    python -m tests.record_behaviour compare A.json B.json

Times, paths, versions and commits are left out; weights, metrics, predictions and splits are compared whole.
"""

import csv
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.unit.finetune.finetuned_runs import write_rows
from tests.unit.tasks.glue_files import write_glue
from tests.unit.tasks.squad.test_task import write

CLOCK_KEYS = re.compile(
    r"(_s$|_s_per_|tokens_per_s|outside_model_share|^time|^started|^finished|commit|version|platform|python|hostname|"
    r"^pid$|_ms$|identity|relative_cost|relative_time|peak_memory)"
)
SHORT = ["train.max_steps=12", "optim.warmup_steps=3", "data.bundled_rows=1500", "train.validate_every_steps=6",
         "train.validation_sequences=64", "train.checkpoint_every_steps=6", "train.log_every_steps=1",
         "train.num_threads=1", "train.batch_sequences=16", "train.alignment_backend=reference"]  # fmt: skip
FRAGMENTS = ["c1ccccc1", "C1CCCCC1", "c1ccncc1", "C1CCOC1", "c1ccsc1", "C1CCNCC1", "CC(C)C", "C/C=C/C", "N[C@@H](C)C"]
TAILS = ["", "C", "CO", "N", "Cl", "C(=O)O", "C(=O)N", "OC", "F", "C#N", "S", "[O-]", "[NH3+]", ".[Na+]", "[13CH3]"]
FINE = ["train.max_epochs=2", "train.batch_sequences=16", "train.num_threads=1", "seeds=[1,2]"]


def main(arguments: Sequence[str]) -> int:
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


Step = Iterator[tuple[str, Any]]


def run_all(root: Path) -> Step:
    write_data(root)
    for name in ("text", "text-mlm", "smiles", "smiles-mlm"):
        yield from step(root, name, f"pretrain --recipe quickstart-{name}", SHORT, out=name)
    words = "tokenize texts.txt --kind text --vocab-size 300"
    yield from step(root, "own-text", words, ["tokenizer.min_frequency=1"], out="own-text")
    yield from finetunings(root)
    yield from grids(root)
    yield from looks(root)


def finetunings(root: Path) -> Step:
    """Yield one tiny fine-tuning of each suite, and of each kind of label."""
    windows = ["task.sequence_length=32", "task.doc_stride=8", "task.max_query_tokens=10"]
    search = ["grid.optim.lr=[1e-4, 3e-4]"]
    for name, words, sets in (
        ("bace", "moleculenet bace --data-dir . --checkpoint smiles --baseline --recipe moleculenet-small", []),
        ("rte", "glue rte --data-dir glue --checkpoint text --recipe glue-small", []),
        ("squad", "squad v2 --data-dir squad --checkpoint text --recipe squad-small", windows),
        ("csv-classes", "csv assay.csv --smiles-column smiles --label-columns kind --checkpoint smiles", []),
        ("csv-regression", "csv assay.csv --smiles-column smiles --label-columns value --checkpoint smiles", []),
        ("csv-labels", "csv assay.csv --smiles-column smiles --label-columns oxygen,nitrogen --checkpoint smiles", []),
        ("csv-text", "csv moods.csv --text-column text --label-columns mood --checkpoint text", []),
        ("csv-grid", "csv assay.csv --label-columns oxygen --checkpoint smiles --grid --seeds 1", search),
    ):
        yield from step(root, name, f"finetune {words}", [*FINE, *sets], out=f"{name}-run")


def grids(root: Path) -> Step:
    """Yield a Repeated-MLM grid and a sweep."""
    short = [f"pretrain.{value}" for value in SHORT]
    tuned = ["finetune.task.data_dir=glue", "finetune.train.max_epochs=1", "finetune.train.batch_sequences=8",
             "finetune.seeds=[1]"]  # fmt: skip
    cells = "--num-repeats 1,2 --mask-ratios 0.387,0.622 --task glue/rte --workers 2"
    yield from step(root, "grid", f"repeat-mlm quickstart-repeat-mlm {cells}", [*short[:-1], *tuned], out="grid")
    variants = ["measure_sequences=32", "only=[mlm,exlm,exlm-no-transitions]"]
    yield from step(root, "sweep", "sweep quickstart-ablations --workers 2", [*short, *variants], out="sweep")


def looks(root: Path) -> Step:
    """Yield what the commands say that only look at runs."""
    yield from step(root, "eval-pretrained", "eval text text-mlm")
    tables = "eval bace-run csv-labels-run --format markdown,csv"
    yield from step(root, "eval-finetuned", tables, out="tables")
    yield from step(root, "eval-glue", "eval rte-run squad-run", out="tables-text")
    yield from step(root, "eval-entropy", "eval --entropy text text-mlm --mask-ratios 0.15,0.5", out="entropy")
    for run, file, suffix in (
        ("bace", "bace.csv", "csv"), ("csv-classes", "assay.csv", "csv"), ("csv-regression", "assay.csv", "csv"),
        ("csv-text", "moods.csv", "csv"), ("rte", "glue/RTE/dev.tsv", "tsv"), ("squad", "squad/dev-v2.0.json", "json"),
    ):  # fmt: skip
        words = f"predict {run}-run {file} --out applied/{run}.{suffix}"
        yield from step(root, f"predict-{run}", words, files="applied", only=run)
    for run, file in (("smiles", "assay.csv"), ("csv-classes-run", "assay.csv"), ("text", "moods.csv")):
        words = f"embed {run} {file} --out vectors/{run}.npz"
        yield from step(root, f"embed-{run}", words, files="vectors", only=run)
    sentence = shlex.quote("This is [MASK], and I'm very [MASK] to see this.")
    for length in ("exact", "any"):
        words = f"inspect-dag {sentence} --checkpoint text --length {length} --n-best 5 --format json"
        yield from step(root, f"dag-{length}", words, out=f"dag-{length}")
    yield from step(root, "recipes", "recipes")
    yield from step(root, "recipe", "recipes text-base")
    yield from step(root, "curves", "curves text text-mlm --out curves")


def step(
    root: Path,
    name: str,
    words: str,
    overrides: Sequence[str] = (),
    *,
    out: str | None = None,
    files: str | None = None,
    only: str = "",
) -> Step:
    """Run a command in `root` and yield what it printed as JSON and the files it made."""
    command = ["exlm", *shlex.split(words), "--json", *(part for value in overrides for part in ("--set", value))]
    environment = os.environ | {"EXLM_CACHE_DIR": str(root / "cache"), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    command += ["--out", out] if out else []
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
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
        case ".safetensors":
            return {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        case ".npz":
            return arrays(path)
        case ".csv":
            with path.open(newline="", encoding="utf-8") as stream:
                rows = list(csv.reader(stream))
            clocks = {i for i, name in enumerate(rows[0]) if CLOCK_KEYS.search(name)} if rows else set()
            return [[cell for i, cell in enumerate(row) if i not in clocks] for row in rows]
        case ".jsonl":
            return [clean(json.loads(line), root) for line in path.read_text(encoding="utf-8").splitlines()]
        case ".json" if path.name not in ("state.json", "manifest.json", "run.json"):
            return clean(json.loads(path.read_text(encoding="utf-8")), root)
        case ".md" | ".tsv":
            text = path.read_text(encoding="utf-8").replace(str(root), "ROOT")
            return re.sub(r"\d+:\d\d:\d\d", "TIME", text).splitlines()
    return None


def arrays(path: Path) -> dict[str, str]:
    """Return a digest of each array of an archive: the archive itself holds the time."""
    import numpy as np

    with np.load(path, allow_pickle=False) as archive:
        return {key: hashlib.sha256(archive[key].tobytes()).hexdigest() for key in archive.files}


def clean(value: Any, root: Path) -> Any:
    """Return JSON without what a clock, a path or an installation decides."""
    if isinstance(value, dict):
        return {key: clean(inner, root) for key, inner in value.items() if not CLOCK_KEYS.search(key)}
    if isinstance(value, list):
        return [clean(inner, root) for inner in value]
    return value.replace(str(root), "ROOT") if isinstance(value, str) else value


def write_data(root: Path) -> None:
    """Write molecules, sentences, RTE and SQuAD in their own layouts."""
    smiles = [f"{ring}{tail}" for ring in FRAGMENTS for tail in TAILS]
    write_rows(root / "bace.csv", ["mol", "Class"], [[text, str(int("O" in text))] for text in smiles])
    rows = [[text, "acid" if "(=O)O" in text else "halide" if "Cl" in text or "F" in text else "other",
             str(len(text) / 7 + text.count("N")), str(int("O" in text)), "" if i % 5 == 0 else str(int("N" in text))]
            for i, text in enumerate(smiles)]  # fmt: skip
    rows += [["C1CC", "other", "1.0", "0", "0"], ["not a molecule", "acid", "2.0", "1", "1"]]
    write_rows(root / "assay.csv", ["smiles", "kind", "value", "oxygen", "nitrogen"], rows)
    moods = [[f"This is {word}, and I'm very {mood} to see this number {i}.", mood]
             for i in range(12) for word, mood in (("great", "glad"), ("awful", "sad"), ("odd", "amused"))]  # fmt: skip
    write_rows(root / "moods.csv", ["text", "mood"], moods)
    (root / "texts.txt").write_text("".join(f"{text}\n" for text, _ in moods), encoding="utf-8")
    write_glue(root / "glue", "rte", copies=20)
    (root / "squad").mkdir()
    write(root / "squad", "train-v2.0.json", "Moss", "Tea")
    write(root / "squad", "dev-v2.0.json", "Clocks")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
