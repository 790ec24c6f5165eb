"""What `exlm eval` does once its options are understood: score runs, apply one, measure entropy."""

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exlm_cli.errors import ConfigError
from exlm_cli.files import expand_path, folder_for_results
from exlm_cli.progress import Progress

if TYPE_CHECKING:
    from exlm_cli.experiments.scores import RunKind
    from exlm_cli.report.tables import ReportTable
    from exlm_cli.tasks.applied import Applied
    from exlm_cli.tasks.new_rows import InputKind

ENTROPY_MASK_RATIOS = (0.15, 0.387, 0.622, 0.789)
"""Those of section 3 from BERT's on."""


@dataclass(frozen=True)
class Output:
    """What is to be written, and how it is told.

    Attributes:
        formats: Of tables as files.
        folder: Of tables, figures and predictions; none: `report/` of the run.
        has_figures: Draw.
        as_json: Tell programs.
    """

    formats: tuple[str, ...]
    folder: Path | None
    has_figures: bool
    as_json: bool


@dataclass(frozen=True)
class InputColumn:
    """The column of a file that a model is to read, and what the user says it holds."""

    kind: "InputKind"
    name: str


@dataclass(frozen=True)
class ChosenRuns:
    """Runs, their kinds, and what they are called beside each other."""

    paths: tuple[Path, ...]
    kinds: "tuple[RunKind, ...]"
    names: tuple[str, ...]

    @property
    def report(self) -> Path:
        """Where results of them go unless told otherwise."""
        from exlm_cli.experiments.scores import run_directory

        return run_directory(self.paths[0]) / "report"


def choose_runs(given: Sequence[Path]) -> ChosenRuns:
    """Return runs with their kinds and names.

    Raises:
        CheckpointError: One is no run.
        ConfigError: One is given twice.
    """
    from exlm_cli.experiments.scores import name_runs, run_kind

    paths = tuple(given)
    return ChosenRuns(paths, tuple(run_kind(path) for path in paths), tuple(name_runs(paths)))


def show_scores(runs: ChosenRuns, data: Sequence[str], output: Output, device: str, progress: Progress) -> None:
    """Score pre-trained runs, read the scores of fine-tuned ones, lay them side by side."""
    from exlm_cli.experiments.scores import load_finetuned_run
    from exlm_cli.report.score_report import collect_tables, draw_figures

    named = list(zip(runs.paths, runs.kinds, runs.names, strict=True))
    finetuned = [load_finetuned_run(path, name) for path, kind, name in named if kind == "finetune"]
    _refuse_idle_folder(output, has_files=output.has_figures and bool(finetuned))
    pretrained = []
    with folder_for_results(output.folder) if output.folder is not None else contextlib.nullcontext():
        for path, kind, name in named:
            if kind == "pretrain":
                from exlm_cli.experiments.evaluate import evaluate_pretrained

                pretrained.append(evaluate_pretrained(path, name, valid=data, device=device, progress=progress))
        files, notes = draw_figures(finetuned, output.folder) if output.has_figures else ([], [])
        _refuse_idle_folder(output, has_files=bool(files))
    tables = collect_tables(finetuned, pretrained)
    for note in notes:
        progress.message(f"note: {note}")
    entries: list[dict[str, Any]] = [{"kind": "pretrain", **asdict(score)} for score in pretrained]
    entries += [{"run_dir": str(run.folder), "name": run.name, **run.results} for run in finetuned]
    # of one run, what scripts look for stands on top too
    top = entries[0] if len(entries) == 1 else {}
    _emit_tables(tables, files, {**top, "runs": entries}, runs, output)


def show_entropy(
    runs: ChosenRuns,
    data: Sequence[str],
    ratios: Sequence[float] | None,
    states: Sequence[int] | None,
    output: Output,
    device: str,
    progress: Progress,
) -> None:
    """Measure the entropy of pre-trained runs at each mask ratio and, of ExLM, number of states."""
    from exlm_cli.report.entropy_report import entropy_table, write_entropy_figure

    for path, kind in zip(runs.paths, runs.kinds, strict=True):
        if kind != "pretrain":
            raise ConfigError(
                f"`--entropy` is of pre-trained models; {path} is a fine-tuned one", "give the run it began with"
            )
    have_states = [_is_exlm(path) for path in runs.paths]
    if states and not any(have_states):
        given = ",".join(map(str, states))
        raise ConfigError(
            f"`--num-states {given}` is for masks with states, which none of these runs has",
            "leave it out, or give a run of ExLM beside them",
        )
    _refuse_idle_folder(output, has_files=output.has_figures)
    from exlm_cli.experiments.entropy import measure_entropy

    writes = output.has_figures or output.formats
    with folder_for_results(output.folder or runs.report) if writes else contextlib.nullcontext():
        entropies = [
            (name, entropy)
            for path, name, has_states in zip(runs.paths, runs.names, have_states, strict=True)
            for entropy in measure_entropy(
                path,
                mask_ratios=ratios or ENTROPY_MASK_RATIOS,
                ks=states or () if has_states else (),
                valid=data,
                device=device,
                progress=progress,
            )
        ]
    files = write_entropy_figure(entropies, output.folder or runs.report) if output.has_figures else []
    content = {"entropies": [{"name": name, **asdict(entropy)} for name, entropy in entropies]}
    _emit_tables([entropy_table(entropies)], files, content, runs, output)


def _refuse_idle_folder(output: Output, *, has_files: bool) -> None:
    """Refuse a folder into which nothing would go: tables are written where formats are named, figures not of all."""
    if output.folder is not None and not output.formats and not has_files:
        raise ConfigError(
            f"`--out {output.folder}`: there are no files to write of this",
            "name those of its tables, as in `--format csv`, or leave it out",
        )


def _is_exlm(path: Path) -> bool:
    """Return whether a run's masks have states; a list of numbers of states is none of copies of Repeated MLM."""
    from exlm_cli.config.load import load_recipe
    from exlm_cli.experiments.scores import run_directory

    return load_recipe(str(run_directory(path) / "recipe.yaml")).objective == "exlm"


def apply_run(
    runs: ChosenRuns,
    data: Sequence[str],
    predictions: Path | None,
    embeddings: Path | None,
    column: InputColumn | None,
    output: Output,
    device: str,
    progress: Progress,
) -> None:
    """Apply one run to one file: predictions of a fine-tuned one, or vectors of any."""
    path = _only_file(runs, data, "--embeddings" if embeddings is not None else "--predictions")
    if output.formats:
        raise ConfigError("`--format` is for tables of scores", "leave it out with `--predictions` and `--embeddings`")
    for option, file in (("--predictions", predictions), ("--embeddings", embeddings)):
        if file is not None and output.folder is not None:
            raise ConfigError(
                f"`--out {output.folder}` does not go with `{option} {file}`",
                f"the one file that is written goes to {file}; give `{option}` the whole path",
            )
    run, kind = runs.paths[0], runs.kinds[0]
    if embeddings is not None:
        return _emit_applied(_embed(run, kind, path, embeddings, column, device, progress), output)
    if kind == "pretrain":
        raise ConfigError(
            f"`--predictions` needs a fine-tuned model; {run} is a pre-trained one",
            "fine-tune it with `exlm finetune`, or write its vectors with `--embeddings`",
        )
    from exlm_cli.finetune.finetuned import load_finetuned
    from exlm_cli.finetune.predict import predict

    finetuned = load_finetuned(run, device=device)
    name = _name_in(run, finetuned.results["input_kind"], column)
    folder = output.folder or runs.report
    _emit_applied(predict(finetuned, path, predictions, folder=folder, column=name, progress=progress), output)


def _embed(
    run: Path, kind: "RunKind", path: Path, written: Path, column: InputColumn | None, device: str, progress: Progress
) -> "Applied":
    from exlm_cli.finetune.embed import (
        check_suffix,
        embed,
        finetuned_encoder,
        pretrained_encoder,
        write_embeddings,
    )
    from exlm_cli.tasks.applied import Applied, refuse_overwriting

    check_suffix(written)
    refuse_overwriting(path, "--embeddings", written)
    if kind == "pretrain":
        from exlm_cli.train.pretrained import load_pretrained

        encoder = pretrained_encoder(load_pretrained(run, device=device, progress=progress))
    else:
        from exlm_cli.finetune.finetuned import load_finetuned

        encoder = finetuned_encoder(load_finetuned(run, device=device))
    name = _name_in(run, encoder.kind, column)
    with folder_for_results(written.parent, written, option="--embeddings"):
        vectors = embed(encoder, path, column=name, progress=progress)
        write_embeddings(vectors, written)
    rows = vectors.rows
    notes = (f"{vectors.cls.shape[1]} numbers a vector", *vectors.notes)
    return Applied((written,), len(rows.table), len(rows.table) - len(rows.readable), {}, notes)


def _name_in(run: Path, kind: "InputKind", column: InputColumn | None) -> str | None:
    """Return the name of the column to read.

    Raises:
        ConfigError: It holds what the model does not read.
    """
    if column is not None and column.kind != kind:
        words = {"text": "text", "smiles": "SMILES"}
        raise ConfigError(
            f"`--{column.kind}-column {column.name}`: {run} is a model of {words[kind]}",
            f"give a run of a model of {words[column.kind]}, or name the column with `--{kind}-column`",
        )
    return None if column is None else column.name


def _emit_tables(
    tables: "Sequence[ReportTable]", files: list[Path], content: dict[str, Any], runs: ChosenRuns, output: Output
) -> None:
    """Write tables in the formats asked for, and tell what there is."""
    from exlm_cli.cli import console
    from exlm_cli.report.tables import write_tables

    if output.formats:
        files = [*files, *write_tables(tables, output.folder or runs.report, output.formats)]
    if output.as_json:
        return console.emit_json({**content, "files": [str(file) for file in files]})
    for table in tables:
        console.emit_renderable(table)
        console.emit_text("")
    if files:
        console.emit_text("\n".join(f"wrote {file}" for file in files))


def _emit_applied(applied: "Applied", output: Output) -> None:
    """Say what became of the rows of a file."""
    from exlm_cli.cli import console

    counts = {"rows": applied.num_rows, "unreadable_rows": applied.num_unreadable}
    if output.as_json:
        files = [str(file) for file in applied.files]
        return console.emit_json({"files": files, **counts, "metrics": applied.metrics, "notes": list(applied.notes)})
    console.emit_pairs({**counts, **applied.metrics})
    for note in applied.notes:
        console.emit_text(f"note: {note}")
    console.emit_text("\n".join(f"wrote {file}" for file in applied.files))


def _only_file(runs: ChosenRuns, data: Sequence[str], option: str) -> Path:
    """Return the file that one run is applied to."""
    if len(data) != 1:
        given = f"{len(data)} are given" if data else "none is given"
        raise ConfigError(
            f"`{option}` needs one `--data` file; {given}", f"`exlm eval RUN --data new.csv {option} FILE`"
        )
    if len(runs.paths) > 1:
        raise ConfigError(
            f"`--data` applies one run to new rows; {len(runs.paths)} are given",
            "give one run at a time; several pre-trained ones alone are scored on validation files",
        )
    return expand_path(data[0])
