"""What cases begin from: small runs and files, and what is done to bytes and values."""

import shutil
from pathlib import Path
from random import Random
from typing import Any

from tests.campaign.trial import Trial
from tests.shared import made_once
from tests.unit.finetune.finetuned_runs import make_runs, words_run

RUNS = {
    "P": "smiles/pretrained", "T": "text", "M": "molecules/run", "W": "words/run", "Q": "squad/run",
}  # fmt: skip
"""Pre-trained on SMILES and on text; fine-tuned on molecules, words and questions."""

TABLE = b"mol,active\n" + b"".join(b"%sO%s,%d\n" % (b"C" * (i % 9 + 1), b"N" * (i % 5), i % 3 // 2) for i in range(60))
NASTY = (
    "\0", "\x1b[31mred", "\r", "\n\n", "\u2028", "\u202e", "\ufeff", "\ud800", "\U0001d518", "\"", "'", ",", "\t", "{",
    "]", "[[[[[[[[", "\\", "\\ud800", "\\u0000", "1e999", "NaN", "-0", "null", "true", "9" * 40, "-1", "[MASK]", "%s",
    "{0}", "$HOME", "~nobody", "../..", "/", "/dev/zero", "/proc/self/mem", "hub:", "bundled:x", "*", "!!x", "&a", "*a",
    "<<: 1", "- ", "? ", "|", "#", "`", "A" * 3000, " " * 300, "C" * 600,
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    *NASTY, None, True, 0, 1, -1, 2, 70, 2**31, 2**63, -(2**70), 0.5, -0.0, 1e308, float("inf"), float("nan"), [], {},
    [[]], [None, 1.5, "x"], {"": {}}, {"a": [1, {"b": None}]},
)  # fmt: skip
"""What an entry of a file gets in place of its own value."""


def runs(trial: Trial) -> Path:
    """Return a folder with the runs of `RUNS`, made once for all workers of a campaign."""

    def make(folder: Path) -> None:
        text = make_runs(folder)
        (folder / "words").mkdir()
        words_run(folder / "words", text, "colour", seeds=(1,))

    return made_once(trial.folder.parent / "made", make)


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
