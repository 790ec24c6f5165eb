"""Cases of damaged runs, and of files that were crafted to be slow, large or deep."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import safetensors.numpy
import yaml

from tests.campaign.material import PACKERS, bring_runs, mutate, mutate_json, values
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
    elif way < 5 or path.suffix not in CRAFTERS:
        path.write_bytes(mutate(rng, content))
    else:
        path.write_bytes(CRAFTERS[path.suffix](rng, content, trial.draw(values)))


def _craft_json(rng: Random, content: bytes, value: Any) -> bytes:
    return json.dumps(mutate_json(rng, json.loads(content), value)).encode()


def _craft_lines(rng: Random, content: bytes, value: Any) -> bytes:
    lines = content.decode().splitlines() or ["{}"]
    at = rng.randrange(len(lines))
    lines[at] = json.dumps(mutate_json(rng, json.loads(lines[at]), value))
    rng.random() < 0.2 and lines.reverse()
    return "\n".join(lines).encode()


def _craft_yaml(rng: Random, content: bytes, value: Any) -> bytes:
    text = yaml.safe_dump(mutate_json(rng, yaml.safe_load(content), value))
    return text.encode("utf-8", "surrogatepass")


def _craft_tensors(rng: Random, content: bytes, _: Any) -> bytes:
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


CRAFTERS: dict[str, Callable[[Random, bytes, Any], bytes]] = {
    ".json": _craft_json, ".jsonl": _craft_lines, ".yaml": _craft_yaml, ".safetensors": _craft_tensors,
}  # fmt: skip


GIB = 1 << 30


def crafted(trial: Trial) -> None:
    """Files that unpack to gigabytes, single records of gigabytes, and things that are deep, wide or many."""
    rng = trial.rng
    way = list(CRAFTED)[trial.number % len(CRAFTED)]
    words = CRAFTED[way](trial, rng)
    trial.exlm(*words, may_change=("out/",))


def _tokenize(name: str, kind: str = "text") -> list[str]:
    return ["tokenize", name, "--kind", kind, "--vocab-size", "300", "--out", "out", "--set", "data.max_rows=50000",
            *([] if name.partition(".")[2][:3] in ("txt", "smi") else ["--set", "data.column=text"])]  # fmt: skip


def _bomb(trial: Trial, rng: Random) -> list[str]:
    """3 GB of one character from a few MB: streams of gz and xz may follow each other."""
    kind = rng.choice(("jsonl", "json", "csv", "tsv", "txt", "smi", "parquet"))
    ending = rng.choice((".gz", ".xz")) if kind in ("txt", "smi") else ".gz"
    piece = rng.choice((b"\0", b" ", b"[", b"A", b'"', b"\r", b",", b"\t")) * (48 << 20)
    start = {"jsonl": b'{"text": "', "json": b'[{"text": "', "csv": b'text\n"', "tsv": b"text\n"}.get(kind, b"")
    name = f"bomb.{kind}{ending}"
    pack = PACKERS[ending]
    trial.write(name, pack(start) + pack(piece) * 64)
    return rng.choice((_tokenize(name, rng.choice(("text", "smiles"))), _predict(trial, name)))


def _predict(trial: Trial, name: str) -> list[str]:
    bring_runs(trial, "PTMW")
    return ["embed", "T", name, "--text-column", "text", "--out", "v.npz"]


def _sparse(trial: Trial, rng: Random) -> list[str]:
    """A file of 3 GB of NUL, which takes no room on the disk."""
    name = f"sparse.{rng.choice(('txt', 'smi', 'csv', 'tsv', 'jsonl', 'json', 'parquet'))}"
    with (trial.folder / name).open("wb") as file:
        file.truncate(3 * GIB)
    return rng.choice((_tokenize(name), _predict(trial, name)))


def _blank(trial: Trial, rng: Random) -> list[str]:
    """Blank lines without end: 3 GB take minutes and little memory, so 24 million lines stand for them."""
    kind = rng.choice(("txt", "smi", "csv", "jsonl", "tsv", "json"))
    name = f"blank.{kind}.{rng.choice(('gz', 'xz')) if kind in ('txt', 'smi') else 'gz'}"
    piece = rng.choice((b"\n", b"\r\n", b" \n")) * (1 << 20)
    trial.write(name, PACKERS[name[-3:]](piece) * 24)
    return _tokenize(name)


def _deep(trial: Trial, rng: Random) -> list[str]:
    depth = rng.choice((900, 5_000, 100_000))
    mark, end = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    body = mark * depth + b"1" + end * depth
    name = rng.choice(("deep.jsonl", "deep.json", "mine.yaml", "deep.csv"))
    trial.write(name, body + b"\n")
    return ["pretrain", "--recipe", name, "--dry-run"] if name == "mine.yaml" else _tokenize(name)


def _wide(trial: Trial, rng: Random) -> list[str]:
    count = rng.choice((10_000, 200_000))
    text = ",".join(f"c{i}" for i in range(count))
    name = rng.choice(("wide.csv", "wide.jsonl", "wide.json"))
    row = json.dumps({f"c{i}": i for i in range(count)} | {"text": "a cat"})
    content = {
        "wide.csv": f"{text},text\n{text},a cat\n",
        "wide.jsonl": f"{row}\n{row}\n",
        "wide.json": f"[{row},{row}]",
    }
    trial.write(name, content[name].encode())
    return rng.choice((_tokenize(name), _predict(trial, name)))


def _long_line(trial: Trial, rng: Random) -> list[str]:
    body = rng.choice((b"word ", b"C", "é".encode(), b"\xff")) * (rng.choice((1, 10)) << 20)
    name = rng.choice(("long.txt", "long.smi", "long.txt.gz"))
    trial.write(name, PACKERS[".gz" if name.endswith("gz") else ""](body))
    return _tokenize(name, rng.choice(("text", "smiles")))


def _recipe(trial: Trial, rng: Random) -> list[str]:
    """Recipes that are huge, extend a thousand others, or are one long value."""
    match rng.randrange(4):
        case 0:
            trial.write("mine.yaml", b"extends: quickstart-text\npurpose: " + b"x" * rng.choice((900_000, 10**7)))
        case 1:
            for i in range(1000):
                trial.write(f"r{i}.yaml", f"extends: r{i + 1}.yaml\n".encode())
            trial.write("mine.yaml", b"extends: r0.yaml\n")
        case 2:
            trial.write("mine.yaml", b"extends: quickstart-text\n" + b"".join(b"k%d: 1\n" % i for i in range(60_000)))
        case _:
            trial.write("mine.yaml", b"extends: mine.yaml\n")
    return [rng.choice(("pretrain", "tokenize")), "--recipe", "mine.yaml", "--dry-run"]


def _sentence(trial: Trial, rng: Random) -> list[str]:
    bring_runs(trial, "PT")
    masks = " [MASK]" * rng.choice((20, 60, 128, 300))
    text = rng.choice((masks, "a" * 100_000, "[MASK] " + "word " * 20_000, "amber" + masks, "\u0301" * 5000))
    return ["inspect-dag", "--checkpoint", rng.choice("PT"), "--format", "none", "--n-best",
            rng.choice(("1", "100")), "--length", rng.choice(("exact", "any")), "--", text]  # fmt: skip


def _curves(trial: Trial, rng: Random) -> list[str]:
    (trial.folder / "run").mkdir()
    loss = rng.choice(("1e308", "-1e308", "0", "null", "3.0", "1e-320", "1e38"))
    lines = "".join(f'{{"kind": "train", "step": {i}, "loss": {loss}}}\n' for i in range(rng.choice((1, 100_000))))
    trial.write("run/metrics.jsonl", lines.encode())
    return ["curves", "run", "--out", "out"]


def _device(trial: Trial, rng: Random) -> list[str]:
    path = rng.choice(("/dev/zero", "/dev/null", "/dev/full", "/proc/self/maps", "loop", "."))
    (trial.folder / "loop").symlink_to("loop")
    bring_runs(trial, "PTM")
    return rng.choice((
        _tokenize(path), ["pretrain", "--recipe", path, "--dry-run"], ["inspect-dag", "[MASK]", "--checkpoint", path],
        ["predict", "M", path], ["tokenize", "--kind", "text", "--tokenizer", path, path], ["curves", path],
        ["recipes", path], ["predict", path, path], ["eval", path], ["pretrain", "--resume", path],
    ))  # fmt: skip


def _odd_name(trial: Trial, rng: Random) -> list[str]:
    """Names of files that are no text, hold line ends, or look like options."""
    name = rng.choice(
        (b"\xff\xfe.txt", b"a\nb.txt", b"\x1b[31m.txt", b"-rf.txt", b"a" * 240 + b".txt", b"*.txt", b"[a].txt")
    )
    Path(os.fsdecode(name)).write_text("the cat sat\n" * 40, encoding="utf-8")
    return rng.choice((_tokenize("."), _tokenize("*.txt"), _tokenize(f"./{os.fsdecode(name)}")))


CRAFTED: dict[str, Callable[[Trial, Random], list[str]]] = {
    "bomb": _bomb, "sparse": _sparse, "deep": _deep, "wide": _wide, "long line": _long_line, "recipe": _recipe,
    "sentence": _sentence, "curves": _curves, "device": _device, "odd name": _odd_name, "blank": _blank,
}  # fmt: skip
