"""Tables of validation metrics of pre-trained checkpoints side by side."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from exlm_cli.format import (
    NO_VALUE,
    NOT_DEFINED,
    format_count,
    format_large,
    format_masks,
    format_measure,
    format_parameters,
)
from exlm_cli.report.tables import Entry, Number, ReportTable, Row

if TYPE_CHECKING:
    from exlm_cli.experiments.evaluate import PretrainedScore

_VALIDATED = {
    "loss": "loss, nats per target",
    "loss_given_length": "loss given the number of targets",
    "loss_independent": "the same if targets were independent",
    "loss_spellings": "loss of another spelling of each molecule",
    "loss_given_length_spellings": "the same given the number of targets",
    "loss_independent_spellings": "the same if targets were independent",
    "perplexity": "perplexity",
    "mask_accuracy": "mask accuracy",
    "mask_accuracy_spellings": "mask accuracy of another spelling",
    "entropy_bits": "entropy, bits",
    "entropy_posterior_bits": "entropy, posterior-weighted, bits",
    "effective_states": "effective states per mask",
    "clones_in_use": "clones in use over all masks",
    "path_entropy_bits": "path entropy, bits per target",
    "masks_with_0_share": "share of masks that yield no token",
    "masks_with_2plus_share": "share of masks that yield 2 or more",
    "tokens_of_first_mask": "tokens of the first mask",
    "tokens_of_middle_mask": "tokens of the middle mask",
    "tokens_of_last_mask": "tokens of the last mask",
    "num_sequences": "sequences scored",
    "num_infeasible": "sequences without an alignment",
}
"""Metrics of a validation in the order of the table, with their headings."""
_COUNTS = ("num_sequences", "num_infeasible")


def pretraining_tables(scores: "Sequence[PretrainedScore]") -> list[ReportTable]:
    """Return the validation metrics of checkpoints, a column each, and those at fixed numbers of masks.

    Without checkpoints there is no table, without such validations only the first.
    """
    return [_metrics_table(scores), *_masks_tables(scores)] if scores else []


def _metrics_table(scores: "Sequence[PretrainedScore]") -> ReportTable:
    rows: list[Row] = [
        (_VALIDATED.get(name, name), *(_validated(name, score.metrics) for score in scores))
        for name in _in_order(score.metrics for score in scores)
    ]
    notes = [
        f"{score.name}: {score.objective}, step {format_count(score.step)}, {format_parameters(score.parameters)} "
        f"parameters, {format_large(score.tokens)} tokens, scored on {score.data}"
        for score in scores
    ]
    if len({score.tokenizer for score in scores}) > 1:
        notes.append("these runs have different tokenizers: do not compare their losses, accuracies and entropies")
    columns = ("metric", *(score.name for score in scores))
    return ReportTable("pretraining", "Pre-trained checkpoints", columns, (tuple(rows),), tuple(notes))


def _masks_tables(scores: "Sequence[PretrainedScore]") -> list[ReportTable]:
    rows_by_at: dict[float, dict[str, Mapping[str, float]]] = {}
    for score in scores:
        for row in score.validated_at:
            rows_by_at.setdefault(row["at"], {})[score.name] = row
    rows: list[Row] = [
        (format_masks(at), _VALIDATED[name], *(_validated(name, by_run.get(score.name, {})) for score in scores))
        for at, by_run in sorted(rows_by_at.items(), key=lambda item: (item[0] < 1, item[0]))
        for name in _VALIDATED
        if any(name in row for row in by_run.values())
    ]
    columns = ("masks", "metric", *(score.name for score in scores))
    note = "scattered masks, the same for every run of one seed; a sequence with fewer tokens has all of them masked"
    table = ReportTable("masks", "At fixed numbers of masks", columns, (tuple(rows),), (note,), num_keys=2)
    return [table] if rows else []


def _in_order(metrics: Iterable[Mapping[str, float]]) -> list[str]:
    """Return the names of metrics in the order of the table; those without a heading come last."""
    names = dict.fromkeys(name for values in metrics for name in values)
    return [*(name for name in _VALIDATED if name in names), *(name for name in names if name not in _VALIDATED)]


def _validated(name: str, metrics: Mapping[str, float]) -> Entry:
    if name not in metrics:
        return NO_VALUE
    return Number(metrics[name], format_count if name in _COUNTS else format_measure, missing=NOT_DEFINED)
