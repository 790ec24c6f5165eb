"""Cases of full and read-only disks, missing permission, servers that fail, and exports."""

import os
from functools import partial
from pathlib import Path

import pytest

from exlm_cli.export.hub import copy_run
from exlm_cli.export.source import finetuned_source, pretrained_source
from exlm_cli.finetune.cells.model import load_finetuned
from exlm_cli.train.pretrained import load_pretrained
from tests.campaign.damaged import WEIGHTY, damage
from tests.campaign.kills import reference
from tests.campaign.material import bring_runs, mutate
from tests.campaign.processes import FINETUNE, PRETRAIN, Started, changed, run_in, small_disk
from tests.campaign.trial import Trial, tree
from tests.fake_hub import TOKEN, running_hub


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


def without_rights(trial: Trial) -> None:
    """Files and folders that the user may not read, write or enter."""
    rng = trial.rng
    bring_runs(trial, "PTM", as_copies=True)
    trial.write("mine.yaml", b"extends: quickstart-text\n")
    (trial.folder / "out").mkdir()
    (trial.folder / "cache").mkdir()
    command = rng.choice((
        ["inspect-dag", "amber [MASK]", "--checkpoint", "T", "--format", "json"],
        ["inspect-dag", "amber [MASK]", "--checkpoint", "T", "--format", "none"],
        ["predict", "M", "new.csv"],
        ["predict", "M", "new.csv", "--out", "out/p.csv"],
        ["embed", "P", "new.csv", "--smiles-column", "mol", "--out", "out/v.npz"],
        ["tokenize", "texts.txt", "--kind", "text", "--vocab-size", "300", "--out", "out/run"],
        ["tokenize", ".", "--kind", "text", "--vocab-size", "300", "--out", "out/run"],
        ["pretrain", "--recipe", "mine.yaml", *changed(PRETRAIN, "train.max_steps=2")[3:], "--out", "out/run"],
        ["pretrain", "--resume", "T"],
        [*changed(FINETUNE, "train.max_epochs=1"), "--out", "out/run"],
        ["eval", "M"],
        ["curves", "M/cells/single/split-0/seed-1"],
    ))  # fmt: skip
    files = sorted(trial.folder.rglob("*"))
    for _ in range(rng.randint(1, 3)):
        rng.choice([trial.folder / name for name in ("out", "cache", "P", "T", "M", "new.csv", "rows.csv", "mine.yaml",
                    "texts.txt")] + files).chmod(rng.choice((0, 0o400, 0o500, 0o200, 0o300)))  # fmt: skip
    said = trial.folder.parent / f"said-{os.getpid()}"
    said.mkdir(exist_ok=True)
    before = tree(trial.folder)
    outcome = Started(said, partial(run_in, trial.folder, command), EXLM_CAMPAIGN_NO_RIGHTS="1").outcome(trial)
    trial.commands.append(tuple(command))
    trial.judge(outcome)
    trial.judge_files(before, outcome, may_change=("out/run/", "M/report/", "T/report/"))
    for path in [trial.folder, *files]:
        path.chmod(0o700)


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

    pushed, _ = reference(trial, f"pushed-{name}", copy, is_timed=False)
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


def pushes(trial: Trial) -> None:
    """A push of a damaged run, or to a Hub that refuses or breaks off: one commit or none."""
    rng = trial.rng
    name, repo = rng.choice("PTM"), "me/run"
    bring_runs(trial, name, as_copies=True)
    way = ("damaged", "at the Hub")[trial.number % 2]
    if way == "damaged":
        damage(trial, rng.choice([path for path in sorted((trial.folder / name).rglob("*")) if path.name in WEIGHTY]))
    with pytest.MonkeyPatch.context() as patch, running_hub(patch, trial.folder / "cache/hub") as server:
        if way == "at the Hub":
            server.cut = rng.choice((None, 0, 10))
            server.refuses = rng.choice((None, None, (401, "no"), (403, TOKEN), (429, "x" * 9999), (500, "no")))
        is_well = way == "at the Hub" and server.cut is None and server.refuses is None
        done = trial.exlm("push", name, repo, codes=(0,) if is_well else (0, 2))
        trial.expect(TOKEN not in done.out + done.err, "the token is shown")
        commits = server.repos.get(repo, [])
        pushed = commits[-1][1] if len(commits) > 1 else {}
        trial.expect(done.code == 2 or {"config.json", "run/recipe.yaml"} <= pushed.keys(), "half a push")
        trial.expect(len(commits) <= 2 and server.repos.keys() <= {repo}, f"other commits: {list(server.repos)[:3]}")
        trial.expect(done.code == 0 or not pushed or server.cut is not None, "a refused push was pushed")
        everywhere = [*pushed.values(), *(path.read_bytes() for path in trial.folder.rglob("*") if path.is_file())]
        trial.expect(not any(TOKEN.encode() in content for content in everywhere), "the token is in a file")


def exports(trial: Trial) -> None:
    """An export of a whole or damaged run, onto a disk with room or without, or killed: the whole folder or none."""
    rng = trial.rng
    name = rng.choice("PTM")
    bring_runs(trial, name, as_copies=True)
    way = ("whole", "damaged", "full disk", "killed")[trial.number % 4]
    if way == "killed":
        Started(trial.folder, ["export", name, "--out", "out"]).kill_after(rng.uniform(0, 10))
        trial.expect(not (trial.folder / "out").exists() or is_exported(trial.folder / "out"), "half an export")
        return
    if way == "damaged":
        damage(trial, rng.choice([path for path in (trial.folder / name).rglob("*.*") if path.name != ".lock"]))
    with small_disk(trial.folder / "disk", 4096 * rng.choice((2, 8, 20))) as make:
        make("full" if way == "full disk" else "large")
        done = trial.exlm("export", name, "--out", "disk/out", codes=(0,) if way == "whole" else (0, 2))
        if done.code == 0:
            trial.expect(is_exported(trial.folder / "disk/out"), "a file of the export is missing")


def is_exported(folder: Path) -> bool:
    """Return whether an exported folder has what transformers needs."""
    return all((folder / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json"))
