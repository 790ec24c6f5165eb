"""What a lent GPU without a network is used for: packed here, trained there, made a run of again here.

    python benchmarks/quarter_hour.py pack text --set 'data.train=[train.txt.xz]' --set 'data.valid=[valid.txt.xz]'
    python benchmarks/quarter_hour.py lay-out text --data FOLDER
    python benchmarks/quarter_hour.py train text-medium --data FOLDER --seconds 200 --run RUN --out OUT
    python benchmarks/quarter_hour.py unpack OUT runs

`pack` writes `.gpu/KIND/`, which git ignores: the token shards, compressed, and what they were made of; and to
`.gpu/wheels/` the packages that the other machine lacks. `lay-out` and `train` run there (`gpu_quarter_hour.sh` calls
them). `train` probes how long a step takes, chooses `train.max_steps` to fill its time, so that the schedule ends with
it, and writes weights in 16 bits and what else a run has. Trainings that begin side by side and share a `--gate` end
with the same FLOPs; one that waits in vain for another says that theirs are not equal. A training that was cut off goes
on from its run. `unpack` makes run directories of what came back.
"""

import argparse
import hashlib
import io
import json
import lzma
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load, load_file, save, save_file

from exlm_cli.cli.console import open_progress
from exlm_cli.config.load import load_recipe
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.cost.counts import recipe_step_flops
from exlm_cli.data.corpus.fingerprint import (
    FingerprintedSource,
    data_fingerprint,
    fingerprint_sources,
    without_copies,
)
from exlm_cli.data.corpus.inputs import BundledSource, resolve_inputs
from exlm_cli.data.corpus.prepare import PreparedData, prepare_data
from exlm_cli.data.corpus.shards import SPELLINGS, TRAIN, VALID, TokenDataset
from exlm_cli.data.rows.records import SKIPPED_FILE
from exlm_cli.data.tokenizer import TOKENIZER_FILE, Tokenizer
from exlm_cli.errors import InterruptedRunError
from exlm_cli.files import write_atomically
from exlm_cli.paths import cache_root
from exlm_cli.run_dir import METRICS_FILE, RUN_FILE, read_metrics, source_commit, update_run_json
from exlm_cli.train import pretrain
from exlm_cli.train.checkpoint import (
    MANIFEST_FILE,
    MODEL_FILE,
    STATE_FILE,
    FileEntry,
    Manifest,
    checkpoint_paths,
)
from exlm_cli.train.pretrain_task import PretrainTask
from exlm_cli.train.pretrained import load_pretrained, pick_device

FOLDER = Path(__file__).parents[1] / ".gpu"
# what such a machine lacks, or may have too old: of the packages that pre-training, doctor and the GPU's tests import
WHEELS = (
    "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "typing-extensions", "typer", "rich", "click",
    "loky", "datasets", "dill", "multiprocess", "pooch", "platformdirs",
)  # fmt: skip
PYTHON, PLATFORMS = "3.12", ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
SHARDS_FILE, PACKED_FILE, ROUNDING_FILE = "shards.tar.xz", "packed.json", "rounding.json"
# pairs of bytes: token ids of 16 bits; presets above 3 gain a tenth and take five times as long
XZ_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 3, "lc": 0, "lp": 1, "pb": 1}]
PART_BYTES = 15 * 2**20
SPARE_SHARE = 0.05
"""Share of the time for steps that is left over: later steps may be slower than those of the probe."""
FINISH_S = 15.0
"""Left for validations, the checkpoint and what comes back."""
WAIT_S = 60.0
"""Longest wait for a training that begins at the same time."""


# Packing, on the machine with the data


def pack(kind: str, recipe: PretrainRecipe) -> None:
    """Write the shards of a recipe and what they were made of to `.gpu/KIND`; make them first if they are not there."""
    progress = open_progress()
    data = prepare_data(recipe, progress=progress)
    cache = cache_root(recipe.data.cache_dir)
    train, valid = (
        fingerprint_sources(resolve_inputs(inputs, kind=recipe.data.kind, progress=progress, key=key), cache, progress)
        for key, inputs in (("data.train", recipe.data.train), ("data.valid", recipe.data.valid))
    )
    packed = {
        "recipe": recipe.name,
        "commit": source_commit(),
        "fingerprint": data.fingerprint,
        "num_rejected": data.num_rejected,
        "train": [[Path(str(one.source)).name, one.content] for one in without_copies(train, progress)],
        "valid": [[Path(str(one.source)).name, one.content] for one in valid],
    }
    folder = FOLDER / kind
    folder.mkdir(parents=True, exist_ok=True)
    before = folder / PACKED_FILE
    if not before.is_file() or json.loads(before.read_bytes())["fingerprint"] != data.fingerprint:
        before.unlink(missing_ok=True)
        write_shards(data, folder / SHARDS_FILE)
    before.write_text(json.dumps(packed, indent=2) + "\n")
    fetch_wheels(FOLDER / "wheels")
    size_bytes = sum(path.stat().st_size for path in (*folder.iterdir(), *(FOLDER / "wheels").iterdir()))
    progress.message(f"{folder} and its wheels: {size_bytes / 2**20:.1f} MiB")


def write_shards(data: PreparedData, path: Path) -> None:
    """Write tokenizer and shards, with lengths of sequences in place of their places, which compress worse."""
    with lzma.open(path, "wb", filters=XZ_FILTERS) as raw, tarfile.open(fileobj=raw, mode="w|") as archive:
        add(archive, TOKENIZER_FILE, data.tokenizer.to_json().encode())
        archive.add(data.train.directory.parent / SKIPPED_FILE, SKIPPED_FILE)
        for split, shards in ((SPELLINGS, data.spellings), (VALID, data.valid), (TRAIN, data.train)):
            if shards is None:
                continue
            add(archive, f"{split}/lengths.bin", shards.lengths.astype("<u4").tobytes())
            for name in ("meta.json", "tokens.bin"):
                archive.add(shards.directory / name, f"{split}/{name}")


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    """Add a file to an archive."""
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def fetch_wheels(folder: Path) -> None:
    """Download the packages that the other machine lacks, in the versions of this environment."""
    wanted = [f"{name}=={metadata.version(name)}" for name in WHEELS]
    if folder.is_dir() and len(list(folder.glob("*.whl"))) == len(wanted):
        return
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--implementation", "cp"]
    subprocess.run([*pip, "--python-version", PYTHON, *platforms, "-d", str(folder), *wanted], check=True)


# On the other machine


def lay_out(kind: str, folder: Path) -> None:
    """Unpack `.gpu/KIND` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(FOLDER / kind / SHARDS_FILE) as archive:
        archive.extractall(folder, filter="data")
    for path in folder.glob("*/lengths.bin"):
        lengths = np.fromfile(path, "<u4").astype("<i8")
        np.concatenate([[0], np.cumsum(lengths)]).astype("<i8").tofile(path.with_name("offsets.bin"))
    shutil.copyfile(FOLDER / kind / PACKED_FILE, folder / PACKED_FILE)


def read_data(recipe: PretrainRecipe, folder: Path) -> PreparedData:
    """Open laid-out shards; they must be those that the recipe makes of the files they were made of."""
    packed = json.loads((folder / PACKED_FILE).read_bytes())
    tokenizer = Tokenizer.load(folder / TOKENIZER_FILE, recipe.data.kind)
    train, valid = (
        [FingerprintedSource(BundledSource(name), content) for name, content in packed[key]] for key in (TRAIN, VALID)
    )
    wanted = data_fingerprint(recipe, train, valid, tokenizer)
    if wanted != packed["fingerprint"]:
        raise SystemExit(f"{folder}: the shards of {packed['recipe']} are not those of {recipe.name}: pack them again")
    train_set, valid_set = (TokenDataset(folder / split, tokenizer.vocab_size) for split in (TRAIN, VALID))
    return PreparedData(
        tokenizer,
        train_set,
        valid_set,
        packed["fingerprint"],
        packed["num_rejected"],
        was_cached=True,
        spellings=TokenDataset(folder / SPELLINGS, tokenizer.vocab_size) if recipe.data.num_spellings > 1 else None,
    )


@dataclass(frozen=True)
class Probe:
    """What a training has measured when it begins. Moments are of the monotonic clock, one for all processes.

    Attributes:
        step_s, flops: Seconds and FLOPs of a step.
        measured_s: Moment of this measurement.
        until_s: Moment until which it may do steps.
    """

    step_s: float
    flops: float
    measured_s: float
    until_s: float


def equal_steps(probes: Sequence[Probe], begin_s: float) -> list[int]:
    """Return the steps of trainings that begin at a moment and end with the same FLOPs, each within its time."""
    flops = min((1 - SPARE_SHARE) * (probe.until_s - begin_s) / probe.step_s * probe.flops for probe in probes)
    return [max(2, int(flops / probe.flops)) for probe in probes]


def train(arguments: argparse.Namespace) -> bool:
    """Train a recipe for about `--seconds`, or go on with a training that was cut off; write what comes back.

    Returns:
        Whether the training is at its end.
    """
    started_s = time.monotonic()
    packed = json.loads((arguments.data / PACKED_FILE).read_bytes())
    names = [f"data.{key}=[{','.join(name for name, _ in packed[key])}]" for key in (TRAIN, VALID)]
    overrides = [*names, *arguments.set]
    recipe = load_recipe(arguments.recipe, overrides)
    data = read_data(recipe, arguments.data)
    progress = open_progress()
    is_whole = True
    # the shards are here and the files they were made of are not
    with mock.patch.object(pretrain, "prepare_data", return_value=data):
        try:
            if checkpoint_paths(arguments.run):
                pretrain.resume_pretraining(arguments.run, progress=progress)
            else:
                shutil.rmtree(arguments.run, ignore_errors=True)
                begun = meet(arguments, "start", {}, arguments.peers)  # so that all probe at the same time
                step_s = probe(overrides, arguments)
                until_s = started_s + arguments.seconds - FINISH_S
                own = Probe(step_s, recipe_step_flops(recipe).total, time.monotonic(), until_s)
                probes = [own, *(Probe(**one) for one in meet(arguments, "probe", asdict(own), 1 + len(begun)))]
                begin_s = max(probe.measured_s for probe in probes)  # the same for all of them
                if len(probes) < arguments.peers:
                    progress.message(
                        f"{recipe.name}: only {len(probes)} of {arguments.peers} trainings met within {WAIT_S:.0f} s, "
                        "so their FLOPs are not equal"
                    )
                    begin_s = time.monotonic()
                num_steps = equal_steps(probes, begin_s)[0]
                left_s = until_s - begin_s
                progress.message(f"{recipe.name}: {1000 * step_s:.1f} ms a step; {num_steps:,} steps in {left_s:.0f} s")
                schedule = [
                    f"train.max_steps={num_steps}",
                    "train.max_epochs=null",
                    f"train.validate_every_steps={-(-num_steps // 4)}",
                    f"train.checkpoint_every_steps={num_steps}",
                ]
                final = load_recipe(arguments.recipe, [*overrides, *schedule])
                pretrain.run_pretraining(final, out=arguments.run, progress=progress)
        except InterruptedRunError as error:  # the time was over earlier; the checkpoint counts
            progress.message(f"{error.message}: what was saved comes back")
            is_whole = False
    if packed["commit"] is not None and source_commit() is None:
        update_run_json(arguments.run, {"git_commit": packed["commit"]})
    arguments.out.mkdir(parents=True, exist_ok=True)
    bring(arguments.run, arguments.out, recipe.name)
    check_rounding(arguments.run, data)
    bring(arguments.run, arguments.out, recipe.name)
    return is_whole


def probe(overrides: Sequence[str], arguments: argparse.Namespace) -> float:
    """Return the seconds of a step, over the second half of a few."""
    num_steps, run = arguments.probe_steps, arguments.run.with_name(f"{arguments.run.name}-probe")
    shutil.rmtree(run, ignore_errors=True)
    short = [
        f"train.max_steps={num_steps}",
        "train.max_epochs=null",
        f"train.log_every_steps={max(1, num_steps // 2)}",
        f"train.validate_every_steps={num_steps}",
        f"train.checkpoint_every_steps={num_steps}",
        "train.validation_sequences=16",
    ]
    pretrain.run_pretraining(load_recipe(arguments.recipe, [*overrides, *short]), out=run)
    rows = [row for row in read_metrics(run / METRICS_FILE) if row["kind"] == "train"]
    shutil.rmtree(run)
    return float((rows[-1]["elapsed_s"] - rows[0]["elapsed_s"]) / (rows[-1]["step"] - rows[0]["step"]))


def meet(arguments: argparse.Namespace, place: str, content: dict[str, float], peers: int) -> list[dict[str, float]]:
    """Wait up to a minute for `peers` trainings, this one included; return what the others have left at a place."""
    if arguments.gate is None:
        return []
    folder = arguments.gate / place
    folder.mkdir(parents=True, exist_ok=True)
    own = folder / f"{arguments.run.name}.json"
    write_atomically(own, json.dumps(content).encode())
    give_up_s = time.monotonic() + WAIT_S
    while len(there := set(folder.glob("*.json"))) < peers and time.monotonic() < give_up_s:
        time.sleep(0.05)
    return [json.loads(path.read_bytes()) for path in sorted(there - {own})]


def bring(run: Path, out: Path, name: str) -> None:
    """Write a run without its optimizer, weights in 16 bits, as an archive in parts of at most 15 MiB."""
    checkpoint = checkpoint_paths(run)[0]
    weights: dict[str, torch.Tensor] = {}
    for key, tensor in load_file(checkpoint / MODEL_FILE).items():
        weights[key] = tensor.half() if tensor.is_floating_point() else tensor
        if not weights[key].isfinite().all():
            raise SystemExit(f"{checkpoint}: `{key}` does not fit in float16")
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        for file in ("recipe.yaml", RUN_FILE, TOKENIZER_FILE, METRICS_FILE, ROUNDING_FILE):
            if (run / file).is_file():
                archive.add(run / file, file)
        archive.add(checkpoint / STATE_FILE, f"{checkpoint.name}/{STATE_FILE}")
        add(archive, f"{checkpoint.name}/{MODEL_FILE}", save(weights))
    content = written.getbuffer()
    num_parts = -(-len(content) // PART_BYTES)
    for old in out.glob(f"{name}.tar.*"):
        old.unlink()
    for index in range(num_parts):
        part = content[index * PART_BYTES : (index + 1) * PART_BYTES]
        (out / f"{name}.tar.{index + 1}-of-{num_parts}").write_bytes(part)


def check_rounding(run: Path, data: PreparedData) -> None:
    """Write to `rounding.json` validation figures, in float32, of the weights as trained and in float16."""
    trained = load_pretrained(run)
    exact = trained.recipe.train.model_copy(update={"precision": "fp32"})
    recipe = trained.recipe.model_copy(update={"train": exact})
    task = PretrainTask(recipe, data, trained.model, pick_device(recipe))
    figures = {"trained": task.validate()}
    with torch.no_grad():
        for parameter in trained.model.parameters():
            parameter.copy_(parameter.half())
    figures["float16"] = task.validate()
    (run / ROUNDING_FILE).write_text(json.dumps({"step": trained.step, **figures}, indent=2) + "\n")


# What came back


def unpack(out: Path, runs: Path) -> list[Path]:
    """Make a run directory, without an optimizer, of every model in a folder that came back; return them."""
    made = []
    for name in sorted({path.name.partition(".tar.")[0] for path in out.glob("*.tar.*")}):
        parts = sorted(out.glob(f"{name}.tar.*"), key=lambda path: int(path.suffix[1:].partition("-")[0]))
        if len(parts) != int(parts[0].name.rpartition("-")[2]):
            raise SystemExit(f"{out}: parts of {name} are missing")
        run = runs / name
        run.mkdir(parents=True)
        with tarfile.open(fileobj=io.BytesIO(b"".join(part.read_bytes() for part in parts))) as archive:
            archive.extractall(run, filter="data")
        (state,) = run.glob(f"step-*/{STATE_FILE}")
        checkpoint = run / "checkpoints" / state.parent.name
        checkpoint.parent.mkdir()
        state.parent.rename(checkpoint)
        rounded = load((checkpoint / MODEL_FILE).read_bytes())
        floats = {key: t.float() if t.is_floating_point() else t for key, t in rounded.items()}
        save_file(floats, checkpoint / MODEL_FILE)
        files = {file: describe(checkpoint / file) for file in (MODEL_FILE, STATE_FILE)}
        step = int(checkpoint.name.removeprefix("step-"))
        (checkpoint / MANIFEST_FILE).write_text(json.dumps(Manifest(step=step, files=files).as_json(), indent=2))
        made.append(run)
        print(f"{run}: {sum(t.numel() for t in floats.values()):,} numbers at step {step:,}")
    return made


def describe(path: Path) -> FileEntry:
    """Return size and hash of a file, for a manifest."""
    content = path.read_bytes()
    return FileEntry(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def main() -> None:
    """Run one of the subcommands."""
    parser = argparse.ArgumentParser(description="Training on a lent GPU without a network")
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="shards and wheels for the other machine, into .gpu/")
    packing.add_argument("kind", choices=["smiles", "text"])
    packing.add_argument("--recipe", help="default: KIND-medium")
    packing.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    laying = commands.add_parser("lay-out", help="unpack the shards there")
    laying.add_argument("kind")
    laying.add_argument("--data", type=Path, required=True)
    training = commands.add_parser("train", help="train there, and write what comes back")
    training.add_argument("recipe")
    training.add_argument("--data", type=Path, required=True, help="folder of lay-out")
    training.add_argument("--seconds", type=float, required=True, help="for everything from the start on")
    training.add_argument("--run", type=Path, required=True)
    training.add_argument("--out", type=Path, required=True)
    training.add_argument("--probe-steps", type=int, default=80)
    training.add_argument("--gate", type=Path, help="folder in which trainings side by side wait for each other")
    training.add_argument("--peers", type=int, default=1, help="trainings that begin side by side, this one included")
    training.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    unpacking = commands.add_parser("unpack", help="make run directories of what came back")
    unpacking.add_argument("out", type=Path)
    unpacking.add_argument("runs", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "pack":
        pack(arguments.kind, load_recipe(arguments.recipe or f"{arguments.kind}-medium", arguments.set))
    elif arguments.command == "lay-out":
        lay_out(arguments.kind, arguments.data)
    elif arguments.command == "train":
        sys.exit(0 if train(arguments) else 1)
    else:
        unpack(arguments.out, arguments.runs)


if __name__ == "__main__":
    main()
