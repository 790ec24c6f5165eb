"""What cases begin from: small runs and files, and what is done to bytes and values."""

import csv
import gzip
import io
import json
import lzma
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import filelock
import hypothesis.strategies as st
import pyarrow as pa
import pyarrow.parquet as pq

from tests.campaign.trial import Trial
from tests.unit.finetune.finetuned_runs import SMILES, make_runs, words_run

RUNS = {
    "P": "smiles/pretrained", "T": "text", "M": "molecules/run", "W": "words/run", "R": "rte/run", "Q": "squad/run",
}  # fmt: skip
"""Pre-trained on SMILES and on text; fine-tuned on molecules, words, pairs of sentences and questions."""

TABLE = b"mol,active\n" + b"".join(b"%sO%s,%d\n" % (b"C" * (i % 9 + 1), b"N" * (i % 5), i % 3 // 2) for i in range(60))
FRAGMENTS = ["c1ccccc1", "C1CCCCC1", "c1ccncc1", "C1CCOC1", "c1ccsc1", "C1CCNCC1", "CC(C)C", "C/C=C/C", "N[C@@H](C)C"]
TAILS = ["", "C", "CO", "N", "Cl", "C(=O)O", "C(=O)N", "OC", "F", "C#N", "S", "[O-]", "[NH3+]", ".[Na+]", "[13CH3]"]
NASTY = (
    "\0", "\x1b[31mred", "\r", "\r\n", "\n\n", "\u2028", "\u202e", "\ufeff", "\ud800", "é", "𝔘", "👩\u200d🚀",
    "\u200b", "\"", "'", ",", "\t", "{", "}", "[", "]", "[[[[[[[[", "\\", "\\ud800", "\\u0000", "1e999",
    "-1e999", "NaN", "-0", "0x10", "null", "true", "9" * 40, "-1", "1,5", "[MASK]", "[CLS]", "[SEP]", "[PAD]",
    "[UNK]", "<s>", "%s", "{0}", "$HOME", "~", "~nobody", "../..", "/", "/dev/null", "/dev/zero",
    "/proc/self/mem", "hub:", "bundled:", "bundled:x", "*", "**", "[a-", "!!x", "&a", "*a", "<<: 1", "- ", "? ",
    "|", ">", "#", "@", "`", "A" * 3000, " " * 300, "C" * 600, "[CH255]", "[CH256]", "[999999C]", "[C+999]",
    "C1CC", "C%99", "((((", ")", "=", "$$", "->", "[Xx]", "c1cc", "C" + "(C)" * 90, "[H][H]",
)  # fmt: skip

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.integers(-2, 70), st.floats(), st.text(max_size=20),
    st.sampled_from(NASTY), st.floats(0, 1),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def runs(trial: Trial) -> Path:
    """Return a folder with the runs of `RUNS`, made once for all workers of a campaign."""
    made = trial.folder.parent / "made"
    with filelock.FileLock(made.with_suffix(".lock")):
        if not made.exists():
            root = made.with_suffix(".new")
            shutil.rmtree(root, ignore_errors=True)
            text = make_runs(root)
            (root / "words").mkdir()
            words_run(root / "words", text, "colour", seeds=(1,))
            root.rename(made)
    return made


def bring_runs(trial: Trial, names: str, *, as_copies: bool = False) -> None:
    """Make links to runs in the folder of a case, or copies, and files that their commands read."""
    made = runs(trial)
    for name in names:
        run, here = made / RUNS[name], trial.folder / name
        shutil.copytree(run, here) if as_copies else here.symlink_to(run)
    trial.write("new.csv", b"mol\n" + b"CCO\nCCN\n" * 100)
    trial.write("words.csv", b"text\namber birch\n")
    trial.write("rows.csv", TABLE)
    trial.write("texts.txt", b"the cat sat on the mat\n" * 300)


def mutate(rng: Random, data: bytes, most: int = 4) -> bytes:
    """Return bytes with one or a few faults."""
    content = bytearray(data)
    for _ in range(rng.randint(1, most)):
        size = len(content)
        at = rng.randrange(size + 1)
        end = min(size, at + rng.choice((1, 2, 8, 64, 1024)))
        match rng.randrange(9):
            case 0 if size:
                content[at % size] ^= 1 << rng.randrange(8)
            case 1 if size:
                content[at % size] = rng.randrange(256)
            case 2:
                del content[at:end]
            case 3:
                content[at:at] = content[at:end] * rng.choice((1, 2, 50))
            case 4 | 5:
                content[at:at] = rng.choice(NASTY).encode("utf-8", "surrogatepass")
            case 6 if rng.random() < 0.3:
                del content[at:]
            case 7:
                content[at:end] = rng.randbytes(end - at)
            case 8:
                other = rng.randrange(size + 1)
                content[at:at] = content[other : other + 200]
    return bytes(content)


def mutate_text(rng: Random, text: str) -> str:
    """Return one line of text with a few faults."""
    mutated = mutate(rng, text.encode("utf-8", "surrogatepass"), most=3).decode("utf-8", "replace")
    return "".join(character for character in mutated if character not in "\r\n\0")


def mutate_json(rng: Random, content: Any, value: Any) -> Any:
    """Return JSON in which one entry is gone, doubled under another key, or has another value."""
    if isinstance(content, dict) and content and rng.random() < 0.85:
        key = rng.choice(list(content))
        changed = dict(content)
        match rng.randrange(8):
            case 0:
                del changed[key]
            case 1:
                changed[f"{key}x"] = content[key]
            case _:
                changed[key] = mutate_json(rng, content[key], value)
        return changed
    if isinstance(content, list) and content and rng.random() < 0.7:
        at = rng.randrange(len(content))
        return [*content[:at], mutate_json(rng, content[at], value), *content[at + 1 :]]
    return value


def smiles(rng: Random) -> str:
    """Return a molecule, now and then one that is none."""
    if rng.random() < 0.1:
        return rng.choice(NASTY)[:400]  # RDKit reads longer ones in processes of their own, which take a second
    return rng.choice(FRAGMENTS) + rng.choice(TAILS) if rng.random() < 0.8 else rng.choice(SMILES)


def sentence(rng: Random) -> str:
    """Return a few words, now and then strange ones."""
    words = [rng.choice(("amber", "birch", "cedar", "the", "cat", "sat", "42", "é")) for _ in range(rng.randint(1, 9))]
    if rng.random() < 0.1:
        words.insert(rng.randrange(len(words) + 1), rng.choice(NASTY))
    return " ".join(words)


def table_bytes(kind: str, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> bytes:
    """Return rows as a file of a kind: txt and smi hold the first column alone."""
    match kind:
        case "txt" | "smi":
            text = "".join(f"{row[0]}\n" for row in rows)
        case "jsonl":
            text = "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)
        case "json":
            text = json.dumps([dict(zip(names, row, strict=True)) for row in rows])
        case "parquet":
            columns = {
                name: [str(row[i]).encode("utf-8", "replace").decode() for row in rows] for i, name in enumerate(names)
            }
            sink = io.BytesIO()
            pq.write_table(pa.table(columns), sink)
            return sink.getvalue()
        case _:
            out = io.StringIO()
            writer = csv.writer(out, delimiter="\t" if kind == "tsv" else ",", lineterminator="\n")
            writer.writerows([names, *rows])
            text = out.getvalue()
    return text.encode("utf-8", "surrogatepass")


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, ".gz": lambda data: gzip.compress(data, 1), ".xz": lambda data: lzma.compress(data, preset=0),
}  # fmt: skip


def write_hostile(trial: Trial, stem: str, kind: str, data: bytes, *, share_mutated: float = 0.8) -> Path:
    """Write a file, mutated before or after it is packed, and return its path."""
    rng, ending = trial.rng, trial.rng.choice(("", "", "", ".gz", ".xz"))
    is_mutated, is_outer = rng.random() < share_mutated, rng.random() < 0.3
    if is_mutated and not is_outer:
        data = mutate(rng, data)
    packed = PACKERS[ending](data)
    if is_mutated and is_outer:
        packed = mutate(rng, packed)
    path = trial.folder / f"{stem}.{kind}{ending}"
    path.write_bytes(packed)
    return path
