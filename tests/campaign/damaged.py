"""Cases of damaged runs."""

import contextlib
import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import safetensors.numpy
import yaml

from tests.campaign.material import VALUES, bring_runs, mutate, mutate_json
from tests.campaign.trial import Trial
from tests.unit.finetune.synthetic import sign

READERS: dict[str, tuple[str, ...]] = {
    "P": (
        "inspect-dag C[MASK]O --checkpoint P --format none", "embed P new.csv --smiles-column mol --out v.npz",
        "eval P --no-figures", "curves P",
        "finetune csv rows.csv --checkpoint P --smiles-column mol --label-columns active --split random --seeds 1 "
        "--no-baseline --out out --set train.max_epochs=1",
    ),
    "T": (
        "inspect-dag a[MASK]b --checkpoint T --format none", "embed T words.csv --text-column text --out v.npz",
        "pretrain --resume T", "eval --entropy T --mask-ratios 0.5 --out out --no-figures",
    ),
    "M": (
        "predict M new.csv --out p.csv", "embed M new.csv --out v.parquet", "eval M --no-figures",
        "finetune --resume M", "curves M/cells/single/split-0/seed-1",
    ),
    "W": ("predict W words.csv --out p.csv", "eval W --no-figures --format csv --out out"),
    "Q": ("eval Q --no-figures",),
}  # fmt: skip
"""Commands that read a run, by the run."""
LOADERS = ("inspect-dag", "embed", "predict", "finetune csv", "pretrain --resume", "eval P", "eval --entropy")
"""Commands that load its weights."""


def checkpoints(trial: Trial) -> None:
    """A run in which one file is damaged: its bytes, its values, or the whole of it."""
    rng = trial.rng
    name = rng.choice("PPTTMMWQ")
    bring_runs(trial, name, as_copies=True)
    run = trial.folder / name
    files = sorted(path for path in run.rglob("*") if path.is_file() and path.name != ".lock")
    weighty = [path for path in files if path.name in WEIGHTY]
    path = rng.choice(weighty if rng.random() < 0.6 else files)
    before = path.read_bytes()
    damage(trial, path)
    is_signed = rng.random() < 0.5 and (path.parent / "manifest.json").is_file() and path.name != "manifest.json"
    if is_signed:
        with contextlib.suppress(OSError, KeyError, ValueError):
            sign(path.parent)
    command = rng.choice(READERS[name])
    is_resumed = "--resume" in command
    done = trial.exlm(*command.split(), may_change=(f"{name}/",) if is_resumed else (f"{name}/report",))
    is_same = path.is_file() and path.read_bytes() == before
    if path.name == "model.safetensors" and name in "PT" and command.startswith(LOADERS):
        trial.expect(done.code == 2 or is_signed or is_same, "weights that do not fit their hash were taken")


WEIGHTY = ("model.safetensors", "manifest.json", "state.json", "tokenizer.json", "recipe.yaml", "run.json",
           "results.json", "scores.csv", "result.json", "metrics.jsonl", "encoder.yaml")  # fmt: skip


def damage(trial: Trial, path: Path) -> None:
    rng, content = trial.rng, path.read_bytes()
    way = rng.randrange(10)
    if way == 0:
        path.unlink()
        [lambda: None, path.mkdir, lambda: path.symlink_to(path), lambda: path.touch()][rng.randrange(4)]()
    elif way == 1:
        path.write_bytes(content[: rng.randrange(len(content) + 1)])
    elif way == 2:
        others = [other for other in path.parents[1].rglob("*") if other.is_file() and other != path]
        shutil.copyfile(rng.choice(others), path)
    elif way < 5:
        path.write_bytes(mutate(rng, content))
    else:
        path.write_bytes(craft(rng, path.suffix, content))


def craft(rng: Random, suffix: str, content: bytes) -> bytes:
    """Return content of the right form with another value, or key, in one place."""
    value = rng.choice(VALUES)
    match suffix:
        case ".json":
            text = json.dumps(mutate_json(rng, json.loads(content), value))
        case ".yaml":
            text = yaml.safe_dump(mutate_json(rng, yaml.safe_load(content), value))
        case ".jsonl":
            lines = content.decode().splitlines() or ["{}"]
            at = rng.randrange(len(lines))
            lines[at] = json.dumps(mutate_json(rng, json.loads(lines[at]), value))
            text = "\n".join(lines)
        case ".safetensors":
            return _craft_tensors(rng, content)
        case _:
            return mutate(rng, content)
    return text.encode("utf-8", "surrogatepass")


def _craft_tensors(rng: Random, content: bytes) -> bytes:
    tensors = safetensors.numpy.load(content)
    if not tensors:
        return content[::-1]
    name = rng.choice(list(tensors))
    tensor = tensors[name]
    other: list[Any] = [
        tensor.astype(rng.choice(("float64", "float16", "int64", "uint8", "bool"))), tensor[..., :-1], tensor[None],
        np.full_like(tensor, rng.choice((np.nan, np.inf, 1e38, 0.0))), np.zeros((0,), "float32"), tensor.T.copy(),
    ]  # fmt: skip
    match rng.randrange(4):
        case 0:
            del tensors[name]
        case 1:
            tensors[f"{name}.x"] = tensors.pop(name)
        case 2:
            tensors[name] = np.ascontiguousarray(rng.choice(other))
        case _:
            size = int.from_bytes(content[:8], "little")
            header = json.dumps(
                mutate_json(rng, json.loads(content[8 : 8 + size]), rng.choice((-1, 2**64, [0], "F8")))
            ).encode()
            return len(header).to_bytes(8, "little") + header + content[8 + size :]
    return safetensors.numpy.save(tensors)
