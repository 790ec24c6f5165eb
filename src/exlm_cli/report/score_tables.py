"""Scores of runs side by side: a table for each task, and one of pre-trained checkpoints."""

from collections.abc import Sequence

from exlm_cli.experiments.scores import FinetunedRun, PretrainedScore
from exlm_cli.format import NO_VALUE, format_count, format_counts, format_large, format_number
from exlm_cli.report.score_text import as_is, pretraining_budget
from exlm_cli.report.tables import ReportTable

_SHOWN_AS = {
    "loss": "loss, nats per target",
    "perplexity": "perplexity",
    "mask_accuracy": "mask accuracy",
    "entropy_bits": "entropy, bits",
    "entropy_posterior_bits": "entropy, posterior-weighted, bits",
    "effective_states": "effective states per mask",
    "path_entropy_bits": "path entropy, bits per target",
    "masks_with_0_share": "share of masks that yield no token",
    "masks_with_2plus_share": "share of masks that yield 2 or more",
    "num_sequences": "sequences scored",
    "num_infeasible": "sequences without an alignment",
}
_COUNTS = ("num_sequences", "num_infeasible")


def task_tables(runs: Sequence[FinetunedRun]) -> list[ReportTable]:
    """Return a table for each task of the runs, in the order in which tasks come first."""
    tasks = dict.fromkeys(run.results["task"] for run in runs)
    return [task_table([run for run in runs if run.results["task"] == task]) for task in tasks]


def task_table(runs: Sequence[FinetunedRun]) -> ReportTable:
    """Return every metric of runs of one task, a column each; the metric that chose the epoch comes first."""
    first = runs[0].results
    names = sorted(
        dict.fromkeys(name for run in runs for name in run.results["metrics"][run.scored_split]),
        key=lambda name: (name != first["selection_metric"], name == "loss"),
    )
    columns = ["metric", *(run.name for run in runs)]
    rows = [[name, *(as_is(run.summary(name), run.results["aggregate"]) for run in runs)] for name in names]
    has_one_split = len({run.results["split_sha256"] for run in runs}) == 1
    splits = []
    for run in runs:
        yardstick, split = run.results.get("yardstick"), run.results["split_sha256"]
        if yardstick is not None and split not in splits:
            splits.append(split)
            columns.append(yardstick["name"] if has_one_split else f"{yardstick['name']}, rows of {run.name}")
            of_split = yardstick["metrics"][run.scored_split]
            for row, name in zip(rows, names, strict=True):
                row.append(as_is(of_split.get(name), run.results["aggregate"]))
    sizes = format_counts(first["split_sizes"].values())
    return ReportTable(
        "scores-" + first["task"].replace("/", "-"),
        f"{first['task']}, {sizes} rows in {', '.join(first['split_sizes'])}, scored on {runs[0].scored_split}",
        tuple(columns),
        (tuple(map(tuple, rows)),),
        tuple(_describe_run(run) for run in runs) + _differences(runs),
    )


def pretraining_table(scores: Sequence[PretrainedScore]) -> ReportTable:
    """Return the figures of pre-trained checkpoints, a column each."""
    names = dict.fromkeys(name for name in _SHOWN_AS if any(name in score.metrics for score in scores))
    rows = [
        (
            _SHOWN_AS[name],
            *(_figure(name, score.metrics[name]) if name in score.metrics else NO_VALUE for score in scores),
        )
        for name in names
    ]
    notes = [
        f"{s.name}: {s.objective}, step {s.step:,}, {format_large(s.parameters)} parameters, "
        f"{format_large(s.tokens)} tokens, scored on {s.data}"
        for s in scores
    ]
    return ReportTable(
        "pretraining", "Pre-trained checkpoints", ("figure", *(s.name for s in scores)), (tuple(rows),), tuple(notes)
    )


def _figure(name: str, value: float) -> str:
    return format_count(value) if name in _COUNTS else format_number(value)


def _describe_run(run: FinetunedRun) -> str:
    init, seeds = run.results["init"], run.results["seeds"]
    over = f"{run.results['aggregate']} of {len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
    return (
        f"{run.name}: {init['recipe']} ({init['objective']}), pre-training {pretraining_budget(init)}, "
        f"{format_large(run.results['parameters'])} parameters, {over}"
    )


def _differences(runs: Sequence[FinetunedRun]) -> tuple[str, ...]:
    """Warn where runs of one task were scored on different rows."""
    prints = {run.results["split_sha256"] for run in runs}
    if len(prints) == 1:
        return ()
    named = ", ".join(f"{run.name} {run.results['split']} {run.results['split_sha256'][:8]}" for run in runs)
    return (f"these runs were split differently and cannot be compared: {named}",)
