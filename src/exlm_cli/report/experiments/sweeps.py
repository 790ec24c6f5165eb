"""Report of a sweep: tables, CSV, JSON and figures of its variants, seeds together; Tables 2, 4 and 13, Figure 12.

A variant stands in the row of the paper that `PAPER_LABELS` gives its label.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from exlm_cli.experiments.results import CellRuns
from exlm_cli.format import (
    NO_VALUE,
    NOT_DEFINED,
    decimals,
    format_count,
    format_duration,
    format_parameters,
    format_ratio,
)
from exlm_cli.report.curves import ENTROPIES, EntropyLine, plot_curves, write_entropy_figure
from exlm_cli.report.experiments.paper import TABLE_2, TABLE_4, TABLE_13, PaperTable, paper_table
from exlm_cli.report.experiments.seed_groups import (
    VALIDATED,
    SeedGroup,
    SweepReport,
    by_column,
    count_seeds,
    divergence_note,
    fewer_seeds_note,
    group_seeds,
    read_curves,
    seed_note,
    task_metrics,
    unlearned_note,
    write_report_files,
)
from exlm_cli.report.style import RUN_COLOURS
from exlm_cli.report.tables import Entry, Number, ReportTable, Row

_HEADINGS = {
    "loss": "loss",
    "loss_given_length": "loss given T",
    "mask_accuracy": "accuracy %",
    "entropy_bits": "bits",
    "entropy_posterior_bits": "weighted bits",
    "effective_states": "states",
    "path_entropy_bits": "path bits",
}
_LEGEND = (
    "loss: nats per target; loss given T: without the nats for the length of a path, which an MLM does not pay; "
    "accuracy: of masked tokens; bits: entropy of the predictions, mean over states; weighted bits: the same weighted "
    "by the posterior (equal for an MLM, which has one state); states: effective states of a mask; path bits: entropy "
    "of the path per target",
    "each variant is scored under its own masking: scores at different p or k are not comparable",
)
_LEGEND_OF_CTC = "the loss of a variant without transitions is that of CTC on each mask alone, with [UNK] as blank"
_OTHER_DATA = (
    "variants that change `data` or `tokenizer` may have other tokens or validation rows: do not compare their losses, "
    "accuracies and entropies"
)
_DETAILS = ("k", "p", "pre-training", "parameters", "seeds", "time", "changes")
_COLUMNS = {
    "MNLI": "glue/mnli mismatched_accuracy",
    **{name: f"glue/{name.lower()} accuracy" for name in ("QNLI", "QQP", "RTE")},
}
"""Task and metric of the columns of Tables 2, 4 and 13; `docs/paper_map.md` says why MNLI is mismatched."""
PAPER_LABELS: tuple[tuple[PaperTable, tuple[str, ...]], ...] = (
    (TABLE_2, ("exlm-no-2d-rope", "exlm-no-transitions", "mlm", "mlm-plus-plus", "exlm")),
    (
        TABLE_4,
        ("mlm", "exlm-k2", "exlm", "exlm-k8", "mlm-p38.7", "exlm-k2-p38.7", "exlm-k4-p38.7", "exlm-k8-p38.7"),
    ),
    (TABLE_13, ("exlm-no-transitions", "exlm-sparse-dag", "mlm", "exlm")),
)
"""Tables of the paper that a sweep can fill: for each row its variant in the sweep `ablations`."""

Variants = Sequence[SeedGroup]


def write_sweep_report(cells: Sequence[CellRuns], folder: Path, *, name: str, has_figures: bool) -> SweepReport:
    """Write `sweep.csv`, `sweep.md`, the curves, and Figure 12 where entropy was measured at several p.

    Args:
        cells: Curves are those of the first seed of each variant.
        folder: Folder of the report; made if it does not exist.

    Raises:
        CheckpointError: A file cannot be written, or a metrics.jsonl is damaged.
    """
    variants = group_seeds(cells)
    tables, records = sweep_tables(variants, name=name), _records(variants)
    files = write_report_files(folder, "sweep", f"Sweep: {name}", records, tables)
    if has_figures:
        curves = read_curves(cells)
        caption = "training curves, first seed of each variant"
        files += plot_curves(curves, folder / "curves", captions=[caption]) if curves else []
        files += write_figure_12(variants, folder)
    return SweepReport(tables, {"variants": records}, files)


def _records(variants: Variants) -> list[dict[str, Any]]:
    """Return each variant for programs; metrics are means over seeds, `<name>_std` their deviation.

    Entropies at other mask ratios are `entropy_bits_at_0.387` and so on.
    """
    names, ratios = [*VALIDATED, *task_metrics(variants)], _ratios(variants)
    records = []
    for variant in variants:
        line, pretrain = _entropy_line(variant), variant.first.pretrain
        at_ratios = {f"{name}_at_{p:g}": line.spread(p, name) for name in ENTROPIES for p in ratios}
        records.append(
            {
                "variant": variant.first.label,
                "objective": pretrain.objective,
                "num_states_per_mask": pretrain.masking.num_states_per_mask,
                "num_repeats": pretrain.masking.num_repeats,
                "mask_ratio": pretrain.masking.mask_ratio,
                "rope": pretrain.model.rope,
                "alignment": pretrain.model.alignment,
                "batch_sequences": pretrain.train.batch_sequences,
                "batch_tokens": pretrain.train.batch_tokens,
                "parameters": variant.parameters,
                "steps": variant.steps,
                "elapsed_s": variant.elapsed_s,
                **by_column({name: variant.spread(name) for name in names} | at_ratios),
                "seeds": variant.seeds,
                "diverged_seeds": variant.diverged_seeds,
                "changes": variant.first.changes,
            }
        )
    return records


def sweep_tables(variants: Variants, *, name: str) -> list[ReportTable]:
    """Return all tables of a sweep: its variants, entropies over p, tables of the paper."""
    return [_variants_table(variants, name), *_entropy_tables(variants), *paper_tables_of(variants)]


def paper_tables_of(variants: Variants) -> list[ReportTable]:
    """Return the tables of the paper that the variants fill, our rows below the paper's.

    These are the tables in which every row has a variant, or else the table with the most such rows. There are none
    unless a variant has a score on their tasks.
    """
    if all(math.isnan(_score(variant, column)) for variant in variants for column in _COLUMNS):
        return []
    by_label = {variant.first.label: variant for variant in variants}
    matched = [
        (paper, {row: by_label[label] for row, label in zip(paper.rows, labels, strict=True) if label in by_label})
        for paper, labels in PAPER_LABELS
    ]
    whole = [(paper, found) for paper, found in matched if len(found) == len(paper.rows)]
    fullest = max(matched, key=lambda pair: len(pair[1]))
    return [_fill(paper, found) for paper, found in whole or [fullest] if found]


def write_figure_12(variants: Variants, folder: Path) -> list[Path]:
    """Write `figure-12.png` and `.svg`, a line for each variant that was measured at two mask ratios or more.

    Returns:
        The files; none where no variant was.

    Raises:
        CheckpointError: A file cannot be written.
    """
    measured = [variant for variant in variants if len(variant.mask_ratios) > 1]
    seeds, num_colours = count_seeds(measured), len(RUN_COLOURS)
    lines = [
        _entropy_line(variant, variant.first.label, 1 + number % num_colours, number // num_colours)
        for number, variant in enumerate(measured)
    ]
    spread = f"mean and standard deviation of {seeds}" if seeds else "one seed"
    captions = [f"each model on validation data masked at p; {spread}"]
    title = "Entropy of the predictions (Figure 12)"
    return write_entropy_figure(lines, folder, "figure-12", title=title, captions=captions)


def _entropy_line(variant: SeedGroup, label: str = "", colour: int = 0, style: int = 0) -> EntropyLine:
    # a ratio counts as measured even if its entropy is not defined
    by_ratio = {
        ratio: {name: values for name in ENTROPIES if (values := variant.values(name, ratio)) or name == "entropy_bits"}
        for ratio in (variant.mask_ratios if variant.finished else ())
    }
    return EntropyLine(label, variant.first.pretrain.objective == "mlm", by_ratio, colour, style)


def _ratios(variants: Variants) -> list[float]:
    return sorted({ratio for variant in variants for ratio in _entropy_line(variant).entropies})


def _variants_table(variants: Variants, name: str) -> ReportTable:
    names = [key for key in (*_HEADINGS, *task_metrics(variants)) if any(key in group.metrics for group in variants)]
    rows = [(variant.first.label, *map(variant.show, names), *_details(variant)) for variant in variants]
    by_label = {variant.first.label: variant for variant in variants}
    pretrained = [group.first.pretrain for group in variants]
    has_ctc = any((one.objective, one.model.alignment) == ("exlm", "independent") for one in pretrained)
    notes = [*_LEGEND, *([_LEGEND_OF_CTC] if has_ctc else [])]
    if any(key.startswith(("data.", "tokenizer.")) for group in variants for key in group.first.changes):
        notes.append(_OTHER_DATA)
    notes += fewer_seeds_note(by_label, {key: _HEADINGS.get(key, key) for key in names})
    notes += [*_sampled_note(variants), *divergence_note(by_label), *unlearned_note(by_label)]
    return ReportTable(
        "variants",
        f"Variants of {name}{seed_note(variants)}",
        ("variant", *(_HEADINGS.get(key, key) for key in names), *_DETAILS),
        (tuple(rows),),
        tuple(notes),
        num_details=len(_DETAILS),
    )


def _entropy_tables(variants: Variants) -> list[ReportTable]:
    lines = {variant.first.label: _entropy_line(variant) for variant in variants}
    if all(len(line.entropies) < 2 for line in lines.values()):
        return []
    ratios, tables = _ratios(variants), []
    has_both = any("entropy_posterior_bits" in at for line in lines.values() for at in line.entropies.values())
    for name in [*ENTROPIES][: 2 if has_both else 1]:
        rows = [(label, *(_entropy_entry(line, ratio, name) for ratio in ratios)) for label, line in lines.items()]
        tables.append(
            ReportTable(
                f"figure-12-{'states' if name == 'entropy_bits' else 'weighted'}",
                f"Entropy of the predictions in bits over the mask ratio p, {ENTROPIES[name]} (Figure 12)"
                f"{seed_note(variants)}",
                ("variant", *map(format_ratio, ratios)),
                (tuple(row for row in rows if any(str(entry) != NO_VALUE for entry in row[1:])),),
            )
        )
    return tables


def _entropy_entry(line: EntropyLine, ratio: float, name: str) -> Entry:
    spread = line.spread(ratio, name)
    missing = NOT_DEFINED if "entropy_bits" in line.entropies.get(ratio, {}) else NO_VALUE
    return Number(spread.mean, decimals(2), spread.std, missing=missing)


def _fill(paper: PaperTable, found: Mapping[str, SeedGroup]) -> ReportTable:
    ours: list[Row] = [
        (name, *(Number(100 * _score(variant, column), decimals(1)) for column in paper.columns), *_budget(variant))
        for name, variant in found.items()
    ]
    notes = (
        "`paper`: the numbers that it prints; `ours`: this sweep's variants of the same name as in `ablations`, with "
        "their own settings and budget",
        "seeds: pre-training x fine-tuning; the paper gives only those of fine-tuning",
        "MNLI: ours is the mismatched accuracy; the paper's column most likely is too",
        *fewer_seeds_note(found, {name: column for column, name in _COLUMNS.items()}),
        *_sampled_note(list(found.values())),
    )
    return paper_table(paper, "variant", ours, notes)


def _sampled_note(variants: Variants) -> list[str]:
    sampled = {
        task: run.results.split_sizes["train"]
        for variant in variants
        for cell in variant.finished
        for task, run in cell.tuned.items()
        if run.results.max_rows is not None
    }
    tasks = "; ".join(f"{task} ({format_count(size)} rows)" for task, size in sampled.items())
    return [f"fine-tuned on some of the task's rows (`task.max_rows`): {tasks}"] if sampled else []


def _score(variant: SeedGroup, column: str) -> float:
    """Return the accuracy of a column, mean over the seeds, or the mean of all columns; NaN where one is missing."""
    if column not in _COLUMNS:
        values = [_score(variant, name) for name in _COLUMNS]
        return math.fsum(values) / len(values)
    return variant.spread(_COLUMNS[column]).mean


def _details(variant: SeedGroup) -> Row:
    seeds, _, pretraining = _budget(variant)
    values = {key: f"{v:g}" if isinstance(v, float) else v for key, v in variant.first.changes.items()}
    changes = ", ".join(f"{key}={value}" for key, value in values.items())
    parameters = math.nan if variant.parameters is None else variant.parameters
    masking = variant.first.pretrain.masking
    ratio = masking.mask_ratio
    return (
        Number(masking.num_states_per_mask, format_count),
        format_ratio(ratio) if isinstance(ratio, tuple) else Number(ratio, format_ratio),
        pretraining,
        Number(parameters, format_parameters),
        seeds,
        Number(variant.elapsed_s, format_duration),
        changes or NO_VALUE,
    )


def _budget(variant: SeedGroup) -> tuple[str, str, str]:
    """Return seeds, parameters and pre-training in words."""
    num_tuned = max((len(run.results.seeds) for cell in variant.finished for run in cell.tuned.values()), default=0)
    seeds = str(len(variant.seeds)) + (f" x {num_tuned}" if num_tuned else "")
    if variant.steps is None or variant.parameters is None:
        return seeds, NO_VALUE, NO_VALUE
    train = variant.first.pretrain.train
    sequences, tokens = train.batch_sequences, train.batch_tokens
    step = (
        f"at most {format_count(tokens or 0)} tokens" if sequences is None else f"{format_count(sequences)} sequences"
    )
    pretraining = f"{format_count(variant.steps)} steps of {step}"
    return seeds, format_parameters(variant.parameters), pretraining
