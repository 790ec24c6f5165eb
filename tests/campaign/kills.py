"""Cases of `kill -9` at random moments: what an undisturbed run makes comes out."""

import contextlib
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
from tests.campaign.processes import FINETUNE, PRETRAIN, Started
from tests.campaign.trial import Outcome, Trial, tree
from tests.killed import untimed_rows
from tests.ranks import launch_variables
from tests.shared import made_once
from tests.tiny_sweeps import run_cell, tiny_grid, tiny_sweep
from tests.unit.finetune.synthetic import cells, untimed


def killed(
    trial: Trial,
    name: str,
    work: Callable[[Path], Sequence[object] | Callable[[], object]],
    compare: Callable[[Path, Path], None],
    *,
    prepare: Callable[[Path], object] = lambda folder: None,
    num_ranks: int = 1,
) -> None:
    """`kill -9` work at random moments, once or twice, and let it end: it must make what an undisturbed process makes.

    Args:
        name: Of the folder that is compared with, which is made once for all workers.
        work: Returns what begins in a folder, or goes on with what is there.
        compare: Notes faults, given the folder of the killed work and the other one.
        prepare: Makes what the work reads.
        num_ranks: Ranks that do it together; one of two dies, or both.
    """

    def run(folder: Path, kill: Callable[[list[Started]], None] = lambda started: None) -> list[Outcome]:
        with meeting_place(num_ranks) as environments:
            own_cache = {"EXLM_CACHE_DIR": str(folder / "cache")}
            started = [Started(folder, work(folder), **own_cache, **variables) for variables in environments]
            kill(started)
            return [process.outcome(trial) for process in started]

    def run_to_the_end(folder: Path) -> None:
        for outcome in run(folder):
            trial.expect(outcome.code == 0, f"{folder.name} ends with {outcome.code}: {outcome.err[-300:]!r}")

    def make_whole(folder: Path) -> None:
        prepare(folder)
        Started(folder, int).process.join()  # the first process starts a server, which takes seconds
        began = time.monotonic()
        run_to_the_end(folder)
        (folder / "seconds").write_text(str(time.monotonic() - began), encoding="ascii")

    whole = made_once(trial.folder.parent / f"whole-{name}", make_whole)
    seconds = float((whole / "seconds").read_text(encoding="ascii"))
    prepare(trial.folder)
    for _ in range(trial.rng.choice((1, 1, 2))):
        dying = trial.rng.choice((slice(1), slice(1, 2), slice(None)))
        moment = trial.rng.uniform(0, 1.1 * seconds)

        def kill(started: list[Started], dying: slice = dying, moment: float = moment) -> None:
            for process in started[dying] or started:
                process.kill_after(moment)

        for outcome in run(trial.folder, kill):
            if outcome.code not in (0, -signal.SIGKILL):  # a rank that is left says so in one line
                trial.judge(outcome, (2,))
    run_to_the_end(trial.folder)
    if not trial.faults:
        compare(trial.folder, whole)


@contextlib.contextmanager
def meeting_place(num_ranks: int) -> Iterator[list[dict[str, str]]]:
    """Yield the environment of each rank; none for one process."""
    if num_ranks == 1:
        yield [{}]
        return
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield [launch_variables(rank, num_ranks, store.port) for rank in range(num_ranks)]
    del store


def continued(words: Sequence[str], folder: Path) -> list[str]:
    """Return the words that begin a run, or those that continue what a killed process has left."""
    is_begun = (folder / "run/recipe.yaml").exists()
    return [words[0], "--resume", "run"] if is_begun else [*words, "--out", "run"]


def killed_pretraining(trial: Trial) -> None:
    """Weights, moments, metrics and names of files are the same, also of two ranks."""

    def compare(mine: Path, theirs: Path) -> None:
        run, other = mine / "run", theirs / "run"
        for name in ("model.safetensors", "optimizer.safetensors"):
            one, two = ((path / "checkpoints/step-24" / name).read_bytes() for path in (run, other))
            trial.expect(one == two, f"{name} has other bits than that of an undisturbed run")
        trial.expect(untimed_rows(run) == untimed_rows(other), "metrics.jsonl has other rows")
        files = tree(run).keys()
        trial.expect(files == tree(other).keys(), f"other files: {sorted(files ^ tree(other).keys())[:4]}")

    num_ranks = 2 if trial.number % 5 == 4 else 1
    killed(trial, f"pretraining-{num_ranks}", partial(continued, PRETRAIN), compare, num_ranks=num_ranks)


def killed_finetuning(trial: Trial) -> None:
    """With two seeds: weights, scores and predictions are the same."""
    made = runs(trial)

    def prepare(folder: Path) -> None:
        (folder / "rows.csv").write_bytes(TABLE)
        (folder / "P").symlink_to(made / "smiles/pretrained")

    def compare(mine: Path, theirs: Path) -> None:
        run, other = mine / "run", theirs / "run"
        for path in [path.relative_to(other) for path in other.rglob("*")]:
            if path.name == "model.safetensors" or path.name.startswith("predictions-"):
                trial.expect((run / path).read_bytes() == (other / path).read_bytes(), f"{path} has other bytes")
        trial.expect(untimed(cells(run)) == untimed(cells(other)), "other scores")
        # a resumed run writes the path of its checkpoint in full
        one, two = (untimed(read_results(each).as_json()) | {"init": None} for each in (run, other))
        trial.expect(one == two, f"other results: {[key for key in one if one[key] != two.get(key)]}")

    killed(trial, "finetuning", partial(continued, FINETUNE), compare, prepare=prepare)


def killed_sweep(trial: Trial) -> None:
    """A sweep, or one of its cells: weights and metrics are the same."""

    def compare(mine: Path, theirs: Path) -> None:
        for path in [path.relative_to(theirs) for path in theirs.rglob("metrics.jsonl")]:
            folders = ((folder / path).parent for folder in (mine, theirs))
            one, two = ((untimed_rows(f), sorted(f.rglob("model.safetensors"))[-1].read_bytes()) for f in folders)
            trial.expect(one == two, f"{path.parent} has other rows or weights")

    is_whole = trial.number % 4 == 0
    killed(trial, f"sweep-{is_whole}", lambda folder: partial(sweep, folder, is_whole), compare)


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
