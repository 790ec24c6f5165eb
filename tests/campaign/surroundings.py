"""Cases of full and read-only disks, and of a Hub that fails."""

import os
from pathlib import Path

import pytest

from exlm_cli.export.hub import copy_run
from exlm_cli.export.source import finetuned_source, pretrained_source
from exlm_cli.finetune.cells.model import load_finetuned
from exlm_cli.train.pretrained import load_pretrained
from tests.campaign.material import bring_runs, mutate
from tests.campaign.processes import FINETUNE, PRETRAIN, changed, small_disk
from tests.campaign.trial import Trial
from tests.fake_hub import TOKEN, running_hub
from tests.shared import made_once


def disks(trial: Trial) -> None:
    """A disk fills up, or is read-only, under each command; then there is room, and the command ends well."""
    rng = trial.rng
    bring_runs(trial, "PTMW")
    commands: dict[str, list[str]] = {
        "pretrain": [*changed(PRETRAIN, "train.max_steps=8"), "--out", "disk/run"],
        "tokenize": ["tokenize", "texts.txt", "--kind", "text", "--vocab-size", "300", "--out", "disk/run"],
        "finetune": [*changed(FINETUNE, "train.max_epochs=1"), "--out", "disk/run"],
        "predict": ["predict", "M", "new.csv", "--out", "disk/out.csv"],
        "embed": ["embed", "P", "new.csv", "--smiles-column", "mol", "--out", "disk/out.npz"],
        "inspect-dag": ["inspect-dag", "a [MASK]", "--checkpoint", "T", "--out", "disk/out", "--format", "json"],
        "eval": ["eval", "M", "--out", "disk/out", "--format", "csv,markdown", "--no-figures"],
    }  # fmt: skip
    command = rng.choice([*commands, "pretrain", "finetune", "tokenize"])
    words = commands[command]
    if command == "finetune":
        words += ["--workers", str(rng.choice((2, 1)))]  # other processes, or this one
    with small_disk(trial.folder / "disk", 4096 * rng.choice((1, 2, 4, 8, 16, 32, 64))) as make:
        if rng.random() < 0.4:
            os.environ["EXLM_CACHE_DIR"] = str(trial.folder / "disk" / "cache")
        make(rng.choice(("full", "full", "full", "read-only")))
        # tables of `exlm eval` are files of their own, each whole
        first = trial.exlm(
            *words, may_change=("disk/cache", "disk/out/scores") if command == "eval" else ("disk/cache",)
        )
        make("large")
        if first.code == 0:
            return
        is_begun = (trial.folder / "disk/run/recipe.yaml").exists() and command in ("pretrain", "finetune")
        trial.exlm(*([command, "--resume", "disk/run"] if is_begun else words), codes=(0,), may_change=("disk/",))


def hub(trial: Trial) -> None:
    """A run on the Hub that breaks off, has other bytes, lacks or adds files, or is refused: the whole run or none."""
    rng = trial.rng
    name = rng.choice("TM")
    bring_runs(trial, name)

    def copy(folder: Path) -> None:
        is_pretrained = name == "T"
        run = trial.folder / name
        source = (
            pretrained_source(load_pretrained(run, device="cpu")) if is_pretrained
            else finetuned_source(load_finetuned(run, device="cpu"))
        )  # fmt: skip
        copy_run(source, folder / "run")

    pushed = made_once(trial.folder.parent / f"pushed-{name}", copy)
    files = {str(path.relative_to(pushed)): path.read_bytes() for path in pushed.rglob("run/**/*") if path.is_file()}
    served, victim = dict(files), rng.choice(sorted(files))
    with pytest.MonkeyPatch.context() as patch, running_hub(patch, trial.folder / "cache/hub") as server:
        match rng.choice(("bytes", "bytes", "bytes", "lacks", "adds", "cut", "cut", "refuses", "whole")):
            case "bytes":
                served[victim] = mutate(rng, files[victim])
            case "lacks":
                del served[victim]
            case "adds":
                served[f"run/{rng.choice(('../../evil', '/evil', 'a/../../../evil', 'x.py', '~', 'checkpoints'))}"] = (
                    b"{}"
                )
            case "cut":
                server.cut = rng.randrange(3000)
            case "refuses":
                server.refuses = (
                    rng.choice((400, 401, 403, 404, 416, 429, 500, 503)),
                    rng.choice(("no", TOKEN, "x" * 9999)),
                )
        server.commit("me/run", served)
        at = f"hub:me/run{rng.choice(('', '', '', '@main', '@v9'))}"
        words = ["predict", at, "new.csv", "--out", "p.csv"] if name == "M" else [
            "inspect-dag", "amber [MASK]", "--checkpoint", at, "--format", "none"]  # fmt: skip
        done = trial.exlm(*words)
        trial.expect(TOKEN not in done.err, "the token is shown")
        kept = [path for path in (trial.folder / "cache/hub").glob("models--*/blobs/*") if path.suffix != ".incomplete"]
        wrong = [path for path in kept if path.read_bytes() not in served.values()]
        trial.expect(not wrong, f"what is kept was not served: {wrong[:2]}")
        trial.expect(bool(kept) or done.code != 0, "nothing was fetched")
        server.cut = server.refuses = None
        server.commit("me/run", files)
        trial.exlm(*words[:1], *(word.partition("@")[0] for word in words[1:]), codes=(0,), may_change=("p.csv",))
    inside = trial.folder / "cache/hub"
    found = [*trial.folder.parent.glob("*evil*"), *trial.folder.rglob("*evil*")]
    outside = [path for path in found if not path.is_relative_to(inside)]
    trial.expect(not outside, f"written outside: {outside}")
