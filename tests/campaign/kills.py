"""Cases of `kill -9` at random moments, and of processes side by side: what an undisturbed run makes comes out."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist

from exlm_cli.experiments.sweep import run_sweep
from exlm_cli.finetune.results import read_results
from exlm_cli.progress import SilentProgress
from tests.campaign.material import TABLE, runs
from tests.campaign.processes import FINETUNE, PRETRAIN, Started, changed
from tests.campaign.trial import Outcome, Trial, is_temporary, tree
from tests.killed import untimed_rows
from tests.ranks import launch_variables
from tests.shared import made_once
from tests.tiny_sweeps import run_cell, tiny_grid, tiny_sweep
from tests.unit.finetune.synthetic import cells, untimed


def reference(trial: Trial, name: str, make: Callable[[Path], None]) -> tuple[Path, float]:
    """Return what an undisturbed process made, and the seconds that it took; made once for all workers."""

    def make_timed(folder: Path) -> None:
        Started(folder, int).process.join()  # the first process starts a server, which takes seconds
        began = time.monotonic()
        make(folder)
        (folder / "seconds").write_text(str(time.monotonic() - began), encoding="ascii")

    folder = made_once(trial.folder.parent / f"whole-{name}", make_timed)
    return folder, float((folder / "seconds").read_text(encoding="ascii"))


def finished(trial: Trial, folder: Path, words: Sequence[object]) -> None:
    """Run a command to an end that must be 0."""
    outcome = Started(folder, words).outcome(trial)
    trial.expect(outcome.code == 0, f"exit code {outcome.code}: {outcome.err[-300:]!r}")


@contextlib.contextmanager
def meeting_place(num_ranks: int) -> Iterator[list[dict[str, str]]]:
    """Yield the environment of each rank; none for one process."""
    if num_ranks == 1:
        yield [{}]
        return
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield [launch_variables(rank, num_ranks, store.port) for rank in range(num_ranks)]
    del store


def killed_pretraining(trial: Trial) -> None:
    """`kill -9` at a random moment, once or twice, of one or two ranks, then `--resume`: the bits of a whole run."""
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
        dying = rng.choice((slice(1), slice(1, 2), slice(None)))
        moment = rng.uniform(0, 1.1 * seconds)

        def kill(started: list[Started], dying: slice = dying, moment: float = moment) -> None:
            for process in started[dying] or started:
                process.kill_after(moment)

        for outcome in run_all(trial.folder, continued(trial.folder, PRETRAIN), kill):
            if outcome.code not in (0, -signal.SIGKILL):  # a rank that is left says so in one line
                trial.judge(outcome, (2,))
    for outcome in run_all(trial.folder, continued(trial.folder, PRETRAIN), lambda _: None):
        trial.expect(outcome.code == 0, f"it does not go on: exit {outcome.code}, {outcome.err[-300:]!r}")
    run, other = trial.folder / "run", undisturbed / "run"
    if not trial.faults:
        for name in ("model.safetensors", "optimizer.safetensors"):
            mine, theirs = ((path / "checkpoints/step-24" / name).read_bytes() for path in (run, other))
            trial.expect(mine == theirs, f"{name} has other bits than that of an undisturbed run")
        trial.expect(untimed_rows(run) == untimed_rows(other), "metrics.jsonl has other rows")
        left = [name for name in tree(run) if is_temporary(name)]
        trial.expect(not left, f"temporary files stay: {left[:3]}")
        trial.expect(
            tree(run).keys() == tree(other).keys(), f"other files: {sorted(tree(run).keys() ^ tree(other).keys())[:4]}"
        )


def continued(folder: Path, words: Sequence[str]) -> list[str]:
    """Return the words that begin a run, or those that continue what a killed process has left."""
    is_begun = (folder / "run/recipe.yaml").exists()
    return [words[0], "--resume", "run"] if is_begun else [*words, "--out", "run"]


def killed_finetuning(trial: Trial) -> None:
    """`kill -9` of a fine-tuning with two seeds, then `--resume`: weights, scores and predictions are the same."""
    made = runs(trial)

    def whole(folder: Path) -> None:
        prepare(folder)
        finished(trial, folder, [*FINETUNE, "--out", "run"])

    def prepare(folder: Path) -> None:
        (folder / "rows.csv").write_bytes(TABLE)
        (folder / "P").symlink_to(made / "smiles/pretrained")

    undisturbed, seconds = reference(trial, "finetuning", whole)
    prepare(trial.folder)
    for _ in range(trial.rng.choice((1, 1, 2))):
        Started(trial.folder, continued(trial.folder, FINETUNE)).kill_after(trial.rng.uniform(0, 1.1 * seconds))
    finished(trial, trial.folder, continued(trial.folder, FINETUNE))
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
    work = partial(sweep, trial.folder, is_whole)
    Started(trial.folder, work).kill_after(trial.rng.uniform(0, 1.1 * seconds))
    last = Started(trial.folder, work).outcome(trial)
    trial.expect(last.code == 0, f"it does not go on: {last.err[-300:]!r}")
    results = [path.relative_to(undisturbed) for path in undisturbed.rglob("metrics.jsonl")]
    for path in results if last.code == 0 else []:
        mine, theirs = ((folder / path).parent for folder in (trial.folder, undisturbed))
        trial.expect(untimed_rows(mine) == untimed_rows(theirs), f"{path} has other rows")
        weights = [sorted(folder.rglob("model.safetensors"))[-1].read_bytes() for folder in (mine, theirs)]
        trial.expect(weights[0] == weights[1], f"{path.parent} has other weights")


def sweep(folder: Path, is_whole: bool) -> None:
    cache, out = folder / "cache", folder / "run"
    if is_whole:
        is_begun = (out / "recipe.yaml").exists()
        run_sweep(
            tiny_sweep(cache), out=None if is_begun else out, resume=out if is_begun else None, workers=1,
            progress=SilentProgress(),
        )  # fmt: skip
    else:
        run_cell(tiny_grid(cache).plan()[1], out)


def side_by_side(trial: Trial) -> None:
    """Two processes on one empty cache, on one folder, or one that is killed while the other waits."""
    rng = trial.rng
    trial.write("texts.txt", b"the cat sat on the mat\n" * 3000)
    tokenize = ["tokenize", "texts.txt", "--kind", "text", "--vocab-size", "300"]
    short = changed(PRETRAIN, "train.max_steps=4")
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
