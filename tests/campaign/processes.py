"""Cases of kills, disks that are full or read-only, processes side by side, a user without rights, and downloads."""

import contextlib
import ctypes
import hashlib
import http.server
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import filelock
import torch.distributed as dist

from exlm_cli.cli.app import main
from exlm_cli.experiments.cell import run_cell
from exlm_cli.experiments.sweep import run_sweep
from exlm_cli.finetune.results import read_results
from exlm_cli.progress import SilentProgress
from tests.campaign.damaged import damage
from tests.campaign.inputs import write
from tests.campaign.material import PACKERS, copy_runs, link_runs, runs
from tests.campaign.trial import Outcome, Trial, is_temporary, resident_mib, tree
from tests.killed import untimed_rows
from tests.ranks import launch_variables
from tests.tiny_sweeps import tiny_grid, tiny_sweep
from tests.unit.finetune.synthetic import cells, untimed

_CONTEXT = multiprocessing.get_context("forkserver")
_MOUNT, _UMOUNT = (str(shutil.which(name)) for name in ("mount", "umount"))
LONGEST_END_S = 60.0
"""How long a rank may take to notice that another one is gone, and a command to end."""
ENDLESS_S, MOST_GROWN_MIB = 10.0, 300

SMALL = (
    "device=cpu", "data.bundled_rows=300", "model.width=32", "model.ffn_width=16", "model.num_layers=1",
    "model.dropout=0.1", "optim.warmup_steps=1", "train.max_steps=40", "train.checkpoint_every_steps=4",
    "train.validate_every_steps=9", "train.log_every_steps=1", "train.batch_sequences=8", "train.num_threads=1",
    "train.validation_sequences=8", "train.alignment_backend=torch",
)  # fmt: skip
PRETRAIN = ["pretrain", "--recipe", "quickstart-text", *(word for value in SMALL for word in ("--set", value))]
TABLE = "mol,active\n" + "".join(f"{'C' * (i % 9 + 1)}O{'N' * (i % 5)},{i % 3 // 2}\n" for i in range(60))
FINETUNE = ["finetune", "csv", "rows.csv", "--smiles-column", "mol", "--label-columns", "active", "--checkpoint", "P",
            "--split", "random", "--seeds", "1,2", "--set", "train.max_epochs=4", "--set", "train.batch_sequences=8",
            "--set", "train.num_threads=1"]  # fmt: skip


class Started:
    """A process that runs a function, or a command with its streams in files, from a folder."""

    def __init__(self, folder: Path, work: Callable[[], Any] | Sequence[object], **variables: str) -> None:
        self._name = str(folder / f".said-{time.monotonic_ns()}")
        self.words = () if callable(work) else tuple(map(str, work))
        arguments = (folder, self.words or work, dict(os.environ) | variables, self._name)
        _CONTEXT.set_forkserver_preload(["exlm_cli.experiments.cell", "tests.campaign.processes"])
        self.process = _CONTEXT.Process(target=_run, args=arguments)
        self.began = time.monotonic()
        self.process.start()

    def kill_after(self, seconds: float) -> None:
        """Kill it then, as `kill -9` does, unless it has ended."""
        self.process.join(max(0.0, self.began + seconds - time.monotonic()))
        self.process.kill()
        self.process.join()

    def outcome(self, trial: Trial) -> Outcome:
        """Wait for its end."""
        self.process.join(LONGEST_END_S)
        if self.process.exitcode is None:
            trial.faults.append(f"no end after {LONGEST_END_S:g} s: {' '.join(self.words)[:200]}")
            self.process.kill()
            self.process.join()
        trial.commands.append(self.words)
        said = [Path(f"{self._name}-{name}") for name in ("out", "err")]
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in said]
        for path in said:
            path.unlink()
        return Outcome(self.words, self.process.exitcode, *texts)


def _run(folder: Path, work: Any, variables: dict[str, str], said: str) -> None:
    os.environ.clear()
    os.environ |= variables
    os.chdir(folder)
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(f"{said}-{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, number)
    sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8") for number in (1, 2))  # noqa: PTH123, SIM115
    if "EXLM_CAMPAIGN_NO_RIGHTS" in os.environ:
        give_up_rights()
    code = work() if callable(work) else main(work)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def reference(trial: Trial, name: str, make: Callable[[Path], None]) -> tuple[Path, float]:
    """Return what an undisturbed process made, and the seconds that it took; made once for all workers."""
    folder = trial.folder.parent / f"whole-{name}"
    with filelock.FileLock(folder.with_suffix(".lock")):
        if not (folder / "seconds").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            began = time.monotonic()
            make(folder)
            (folder / "seconds").write_text(str(time.monotonic() - began), encoding="ascii")
    return folder, float((folder / "seconds").read_text(encoding="ascii"))


def finished(trial: Trial, folder: Path, *ranks: Sequence[object], **variables: str) -> None:
    """Run a command, or one on each rank, to an end that must be 0."""
    for started in start_ranks(folder, *ranks, **variables):
        outcome = started.outcome(trial)
        trial.expect(outcome.code == 0, f"exit code {outcome.code} of an undisturbed run: {outcome.err[-300:]}")


@contextlib.contextmanager
def meeting_place(num_ranks: int) -> Iterator[list[dict[str, str]]]:
    """Yield the environment of each rank; none for one process."""
    if num_ranks == 1:
        yield [{}]
        return
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield [launch_variables(rank, num_ranks, store.port) for rank in range(num_ranks)]
    del store


def start_ranks(folder: Path, *commands: Sequence[object], **variables: str) -> list[Started]:
    """Start a process for each command."""
    return [Started(folder, command, **variables) for command in commands]


def killed_pretraining(trial: Trial) -> None:
    """`kill -9` at a random moment, once or twice, then `--resume`: the bits of an undisturbed run."""
    num_ranks = 2 if trial.number % 5 == 4 else 1

    def run_all(folder: Path, words: Sequence[object], ending: Callable[[list[Started]], None]) -> list[Outcome]:
        with meeting_place(num_ranks) as environments:
            started = [Started(folder, words, **variables) for variables in environments]
            ending(started)
            return [process.outcome(trial) for process in started]

    def whole(folder: Path) -> None:
        os.environ["EXLM_CACHE_DIR"] = str(folder / "cache")
        outcomes = run_all(folder, [*PRETRAIN, "--out", "run"], lambda _: None)
        trial.expect(all(outcome.code == 0 for outcome in outcomes), f"undisturbed: {outcomes[0].err[-300:]}")
        os.environ["EXLM_CACHE_DIR"] = str(trial.folder / "cache")

    undisturbed, seconds = reference(trial, f"pretraining-{num_ranks}", whole)
    rng = trial.rng
    for _ in range(rng.choice((1, 1, 2))):
        dying = rng.choice((0, 1, -1)) if num_ranks == 2 else -1
        moment = rng.uniform(0, 1.1 * seconds)

        def kill(started: list[Started], dying: int = dying, moment: float = moment) -> None:
            for process in started if dying < 0 else [started[dying]]:
                process.kill_after(moment)

        for outcome in run_all(trial.folder, continued(trial.folder), kill):
            if outcome.code not in (0, -signal.SIGKILL):  # a rank that is left says so in one line
                trial.judge(outcome, (2,))
    for outcome in run_all(trial.folder, continued(trial.folder), lambda _: None):
        trial.expect(outcome.code == 0, f"it does not go on: exit {outcome.code}, {outcome.err[-300:]!r}")
    run, other = trial.folder / "run", undisturbed / "run"
    if not trial.faults:
        for name in ("model.safetensors", "optimizer.safetensors"):
            mine, theirs = ((path / "checkpoints/step-40" / name).read_bytes() for path in (run, other))
            trial.expect(mine == theirs, f"{name} has other bits than that of an undisturbed run")
        trial.expect(untimed_rows(run) == untimed_rows(other), "metrics.jsonl has other rows")
        left = [name for name in tree(run) if is_temporary(name)]
        trial.expect(not left, f"temporary files stay: {left[:3]}")
        trial.expect(
            tree(run).keys() == tree(other).keys(), f"other files: {sorted(tree(run).keys() ^ tree(other).keys())[:4]}"
        )


def continued(folder: Path) -> list[str]:
    """Return the command that begins a run, or continues what a killed process has left."""
    return ["pretrain", "--resume", "run"] if (folder / "run/recipe.yaml").exists() else [*PRETRAIN, "--out", "run"]


def killed_finetuning(trial: Trial) -> None:
    """`kill -9` of a fine-tuning with two seeds, then `--resume`: weights, scores and predictions are the same."""
    made = runs(trial)

    def whole(folder: Path) -> None:
        prepare(folder)
        finished(trial, folder, [*FINETUNE, "--out", "run"])

    def prepare(folder: Path) -> None:
        (folder / "rows.csv").write_text(TABLE, encoding="utf-8")
        (folder / "P").symlink_to(made / "smiles/pretrained")

    def command() -> list[str]:
        is_begun = (trial.folder / "run/recipe.yaml").exists()
        return ["finetune", "--resume", "run"] if is_begun else [*FINETUNE, "--out", "run"]

    undisturbed, seconds = reference(trial, "finetuning", whole)
    prepare(trial.folder)
    for _ in range(trial.rng.choice((1, 1, 2))):
        Started(trial.folder, command()).kill_after(trial.rng.uniform(0, 1.1 * seconds))
    finished(trial, trial.folder, command())
    if not trial.faults:
        same_run(trial, trial.folder / "run", undisturbed / "run")


def same_run(trial: Trial, mine: Path, theirs: Path) -> None:
    """Note where two fine-tuning runs differ; a resumed one writes the path of its checkpoint in full."""
    for path in [path.relative_to(theirs) for path in theirs.rglob("*")]:
        if path.name == "model.safetensors" or path.name.startswith("predictions-"):
            trial.expect((mine / path).read_bytes() == (theirs / path).read_bytes(), f"{path} has other bytes")
    trial.expect(untimed(cells(mine)) == untimed(cells(theirs)), "other scores")
    one, other = (untimed(read_results(run).as_json()) | {"init": None} for run in (mine, theirs))
    trial.expect(one == other, f"other results: {[key for key in one if one[key] != other.get(key)]}")


def killed_sweep(trial: Trial) -> None:
    """`kill -9` of a sweep, or of one of its cells, then again: the same results."""
    is_whole = trial.number % 4 == 0
    undisturbed, seconds = reference(trial, f"sweep-{is_whole}", lambda folder: sweep(folder, is_whole))
    Started(trial.folder, Sweeping(trial.folder, is_whole)).kill_after(trial.rng.uniform(0, 1.1 * seconds))
    last = Started(trial.folder, Sweeping(trial.folder, is_whole)).outcome(trial)
    trial.expect(last.code == 0, f"it does not go on: {last.err[-300:]!r}")
    results = [path.relative_to(undisturbed) for path in undisturbed.rglob("metrics.jsonl")]
    for path in results if last.code == 0 else []:
        mine, theirs = ((folder / path).parent for folder in (trial.folder, undisturbed))
        trial.expect(untimed_rows(mine) == untimed_rows(theirs), f"{path} has other rows")
        weights = [sorted(folder.rglob("model.safetensors"))[-1].read_bytes() for folder in (mine, theirs)]
        trial.expect(weights[0] == weights[1], f"{path.parent} has other weights")


class Sweeping:
    """A sweep as the work of a process."""

    def __init__(self, folder: Path, is_whole: bool) -> None:
        self.folder, self.is_whole = folder, is_whole

    def __call__(self) -> None:
        sweep(self.folder, self.is_whole)


def sweep(folder: Path, is_whole: bool) -> None:
    """Run a tiny sweep, or one of its cells, or continue it."""
    cache, out = folder / "cache", folder / "run"
    if is_whole:
        is_begun = (out / "recipe.yaml").exists()
        run_sweep(
            tiny_sweep(cache), out=None if is_begun else out, resume=out if is_begun else None, jobs=1,
            progress=SilentProgress(),
        )  # fmt: skip
    else:
        run_cell(tiny_grid(cache).plan()[1], out, SilentProgress())


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Callable[[str], None]]:
    """Yield a function that makes the disk under `folder` "full", "read-only" or "large".

    Root gets a file system of that size of its own; another user a limit on the size of each file, and no writing.
    """
    folder.mkdir()
    if os.geteuid() != 0:
        limits = {"full": size, "large": resource.RLIM_INFINITY}

        def limit(state: str) -> None:
            folder.chmod(0o500 if state == "read-only" else 0o700)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limits.get(state, size), resource.RLIM_INFINITY))

        try:
            yield limit
        finally:
            limit("large")
        return
    options = {"full": f"rw,size={size}", "read-only": "ro", "large": "rw,size=64m"}
    subprocess.run([_MOUNT, "-t", "tmpfs", "-o", options["full"], "exlm-campaign", folder], check=True)
    try:
        yield lambda state: subprocess.run([_MOUNT, "-o", f"remount,{options[state]}", folder], check=True) and None
    finally:
        os.chdir(folder.parent)
        subprocess.run([_UMOUNT, "--lazy", folder], check=True)


def disks(trial: Trial) -> None:
    """A disk fills up, or is read-only, under each command; then there is room, and the command ends well."""
    rng = trial.rng
    link_runs(trial, "PTMW")
    write(trial, "rows.csv", TABLE.encode())
    write(trial, "new.csv", b"mol\n" + b"CCO\n" * 200)
    write(trial, "texts.txt", b"the cat sat on the mat\n" * 300)
    commands: dict[str, list[str]] = {
        "pretrain": [*PRETRAIN, "--set", "train.max_steps=8", "--out", "disk/run"],
        "tokenize": ["tokenize", "texts.txt", "--kind", "text", "--vocab-size", "300", "--out", "disk/run"],
        "finetune": [*FINETUNE, "--set", "train.max_epochs=1", "--out", "disk/run"],
        "predict": ["predict", "M", "new.csv", "--out", "disk/out.csv"],
        "embed": ["embed", "P", "new.csv", "--smiles-column", "mol", "--out", "disk/out.npz"],
        "inspect-dag": ["inspect-dag", "a [MASK]", "--checkpoint", "T", "--out", "disk/out", "--format", "dot,json"],
        "eval": ["eval", "M", "--out", "disk/out", "--format", "csv,markdown", "--no-figures"],
    }  # fmt: skip
    command = rng.choice([*commands, "pretrain", "finetune", "tokenize"])
    words = commands[command]
    with small_disk(trial.folder / "disk", 4096 * rng.choice((1, 2, 4, 8, 16, 32, 64))) as make:
        if rng.random() < 0.4:
            os.environ["EXLM_CACHE_DIR"] = str(trial.folder / "disk" / "cache")
        make(rng.choice(("full", "full", "full", "read-only")))
        first = trial.exlm(*words, may_change=("disk/cache",))
        make("large")
        if first.code == 0:
            return
        is_begun = (trial.folder / "disk/run/recipe.yaml").exists() and command in ("pretrain", "finetune")
        trial.exlm(*([command, "--resume", "disk/run"] if is_begun else words), codes=(0,), may_change=("disk/",))


def side_by_side(trial: Trial) -> None:
    """Two processes on one empty cache, on one folder, or one that is killed while the other waits."""
    rng = trial.rng
    write(trial, "texts.txt", b"the cat sat on the mat\n" * 3000)
    tokenize = ["tokenize", "texts.txt", "--kind", "text", "--vocab-size", "300"]
    short = [*PRETRAIN, "--set", "train.max_steps=4"]
    first = rng.choice((tokenize, short))
    way = ("empty cache", "one folder", "killed", "one run")[trial.number % 4]
    if way == "one run":
        finished(trial, trial.folder, [*short, "--out", "run-0"])
    outs = ["run-0", "run-0" if way.startswith("one") else "run-1"]
    words = ["pretrain", "--resume", "run-0", "--set", "train.max_steps=4"] if way == "one run" else None
    started = []
    for out in outs:
        started.append(Started(trial.folder, words or [*first, "--out", out]))
        time.sleep(rng.choice((0, 0, rng.uniform(0, 0.5))))
    if way == "killed":
        started[0].kill_after(rng.uniform(0, 1))
    outcomes = [process.outcome(trial) for process in started]
    for outcome in outcomes[way == "killed" :]:
        trial.judge(outcome, (0, 2) if way.startswith("one") else (0,))
    codes = [outcome.code for outcome in outcomes[way == "killed" :]]
    trial.expect(0 in codes, f"no process ended well: {codes}, {outcomes[-1].err[-300:]!r}")
    if way == "empty cache" and not trial.faults:
        same = [
            [path.read_bytes() for path in sorted((trial.folder / out).rglob("*")) if path.suffix == ".safetensors" or
             path.name == "tokenizer.json"] for out in outs
        ]  # fmt: skip
        trial.expect(same[0] == same[1], "two processes on one cache made different bytes")


def without_rights(trial: Trial) -> None:
    """Files and folders that the user may not read, write or enter."""
    rng = trial.rng
    copy_runs(trial, "PTM")
    write(trial, "new.csv", b"mol\nCCO\nCCN\n")
    write(trial, "rows.csv", TABLE.encode())
    write(trial, "texts.txt", b"the cat sat on the mat\n" * 30)
    write(trial, "mine.yaml", b"extends: quickstart-text\n")
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
        ["pretrain", "--recipe", "mine.yaml", *PRETRAIN[3:], "--set", "train.max_steps=2", "--out", "out/run"],
        ["pretrain", "--resume", "T"],
        [*FINETUNE, "--out", "out/run", "--set", "train.max_epochs=1"],
        ["eval", "M"],
        ["curves", "M/cells/single/seed-1"],
    ))  # fmt: skip
    files = sorted(trial.folder.rglob("*"))
    for _ in range(rng.randint(1, 3)):
        rng.choice([trial.folder / name for name in ("out", "cache", "P", "T", "M", "new.csv", "rows.csv", "mine.yaml",
                    "texts.txt")] + files).chmod(rng.choice((0, 0o400, 0o500, 0o200, 0o300)))  # fmt: skip
    said = trial.folder.parent / f"said-{os.getpid()}"
    said.mkdir(exist_ok=True)
    before = tree(trial.folder)
    outcome = Started(said, InFolder(trial.folder, command), EXLM_CAMPAIGN_NO_RIGHTS="1").outcome(trial)
    trial.commands.append(tuple(command))
    trial.judge(outcome)
    trial.judge_files(before, outcome, may_change=("out/run/",))
    for path in [trial.folder, *files]:
        path.chmod(0o700)


class InFolder:
    """A command in another folder than that of its streams."""

    def __init__(self, folder: Path, words: Sequence[str]) -> None:
        self.folder, self.words = folder, words

    def __call__(self) -> int:
        os.chdir(self.folder)
        return main(self.words)


def downloads(trial: Trial) -> None:
    """A public file whose server breaks off, is busy, lies about the size or sends other bytes."""
    import exlm_cli.tasks.moleculenet as task

    rng = trial.rng
    content = TABLE.replace("mol,active", "mol,Class").encode()
    link_runs(trial, "P")
    faults = [rng.choice(("whole", "short", "altered", "long", "empty", "busy", "gone", "closed")) for _ in range(4)]

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

        def do_GET(self) -> None:
            fault = faults.pop(0) if faults else "whole"
            if fault == "closed":
                self.connection.close()
                return
            if fault in ("busy", "gone"):
                self.send_error(503 if fault == "busy" else 404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            sent = {"short": content[: len(content) // 2], "altered": content[::-1], "long": content * 9, "empty": b""}
            self.wfile.write(sent.get(fault, content))

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    bace = task.MOLECULENET_SETS["bace"]
    url = f"http://127.0.0.1:{server.server_address[1]}/bace.csv"
    remote = replace(bace.remote, url=url, sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))
    words = ["finetune", "moleculenet", "bace", "--checkpoint", "P", "--recipe", "moleculenet-small", "--seeds", "1",
             "--split", "random", "--set", "train.max_epochs=1", "--set", "train.num_threads=1"]  # fmt: skip
    try:
        with (
            mock.patch.dict(task.MOLECULENET_SETS, bace=replace(bace, remote=remote)),
            mock.patch("pooch.core.time.sleep"),
        ):
            done = trial.exlm(*words, "--out", "out")
            kept = [path for path in (trial.folder / "cache").rglob("*") if path.suffix == ".csv"]
            trial.expect(all(path.read_bytes() == content for path in kept), "wrong bytes are in the cache")
            if done.code == 2:
                faults.clear()
                trial.exlm(*words, "--out", "again", codes=(0,))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def give_up_rights() -> None:
    """Drop all capabilities, so that the permissions of files hold for root as for anybody."""
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(header, none) == 0


def endless(trial: Trial) -> None:
    """3 GB of blank lines from a few MB, which take minutes: memory stays as it is, and a signal ends the command."""
    rng = trial.rng
    kind, ending = rng.choice(("txt", "smi", "csv", "tsv", "jsonl", "json")), rng.choice((".gz", ".xz"))
    packed = PACKERS[ending](rng.choice((b"\n", b"\r\n", b" \n")) * (16 << 20))
    name = write(trial, f"blank.{kind}{ending}", packed * 192)
    started = Started(trial.folder, ["tokenize", name, "--kind", "text", "--vocab-size", "300", "--out", "out"])
    before = resident_mib(started.process.pid)
    started.process.join(ENDLESS_S)
    grown = resident_mib(started.process.pid) - before
    trial.expect(grown < MOST_GROWN_MIB, f"grew by {grown:,.0f} MiB")
    started.process.terminate()
    outcome = started.outcome(trial)
    if outcome.code not in (-signal.SIGTERM, 128 + signal.SIGTERM):
        trial.judge(outcome, (2,))
    trial.expect(not (trial.folder / "out").exists() or not list((trial.folder / "out").iterdir()), "half a result")


def exports(trial: Trial) -> None:
    """An export of a whole or damaged run, onto a disk with room or without, or killed: the whole folder or none."""
    rng = trial.rng
    name = rng.choice("PTM")
    copy_runs(trial, name)
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


def own_mounts() -> None:
    """Keep what this process mounts to itself, so that it is gone when the process is."""
    if os.geteuid() == 0 and ctypes.CDLL(None).unshare(0x00020000) == 0:  # CLONE_NEWNS
        subprocess.run([_MOUNT, "--make-rprivate", "/"], check=True)
