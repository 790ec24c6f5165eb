"""Tables of the rows of the study."""

from collections.abc import Mapping, Sequence

import numpy as np

from masks import OWN, SEPARATOR, VALIDATION, sentences_of
from models import MODEL, TWIN
from record import FILLINGS, NAME
from rows import mean_and_half, read_rows
from tasks import MOLECULES


def table() -> str:
    """Return the tables of all rows; of rows for the same cell, the last ones count."""
    figures: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in read_rows(NAME):
        figures.setdefault((row["data"], row["method"], row["split"]), {})[row["metric"]] = float(row["value"])
    lines: list[str] = []
    lines += _masked_table(figures)
    lines += _task_table(figures, MOLECULES, "roc_auc", "test ROC-AUC, %, scaffold-balanced splits")
    lines += _task_table(figures, ("sst2", "mrpc"), "accuracy", "accuracy on the development set, %, one seed")
    lines += _fillings_table(figures)
    lines += _claims(figures)
    return "\n".join(lines)


Found = Mapping[tuple[str, str, str], Mapping[str, float]]


def _masked_table(found: Found) -> list[str]:
    lines = ["", "masked tokens", "", "| file | p | method | loss given T | accuracy | entropy, bits |"]
    lines += ["|---|---|---|---|---|---|"]
    for (data, method, split), of in found.items():
        if data in VALIDATION:
            shown = [
                f"{of['loss_given_length']:.3f}",
                f"{100 * of['mask_accuracy']:.1f} %",
                f"{of['entropy_bits']:.2f}",
            ]
            lines.append(f"| {data} | {split} | {method} | {' | '.join(shown)} |")
    return lines


def _task_table(found: Found, names: Sequence[str], metric: str, title: str) -> list[str]:
    methods = list(dict.fromkeys(method for data, method, _ in found if data in names))
    lines = ["", title, "", f"| method | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for method in methods:
        shown = []
        for name in names:
            values = [100 * of[metric] for (data, m, _), of in found.items() if (data, m) == (name, method)]
            less = _differences(found, name, method, metric)
            shown.append(f"{_with_spread(values)}{f'; ExLM less this {less}' if less else ''}")
        lines.append(f"| {method} | {' | '.join(shown)} |")
    return lines


def _with_spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = f" ({', '.join(f'{value:.1f}' for value in values)})" if len(values) > 1 else ""
    return f"{np.mean(values):.1f}{spread}"


def _differences(found: Found, name: str, method: str, metric: str) -> str:
    """Return fine-tuned ExLM less a method on the same splits, in points, with its 95 % interval over splits."""
    pairs = [
        (of[metric], found[name, MODEL, split][metric])
        for (data, m, split), of in found.items()
        if (data, m) == (name, method) and (name, MODEL, split) in found
    ]
    if method == MODEL or not pairs:
        return ""
    gaps = [100 * (model - other) for other, model in pairs]
    if len(gaps) < 2:
        return f"{gaps[0]:+.1f}"
    return "{:+.1f} ± {:.1f}".format(*mean_and_half(gaps))


def _fillings_table(found: Found) -> list[str]:
    lines = []
    for (data, method, _), of in found.items():
        if data in ("clozes", "pairs"):
            listed = ", ".join(f"{name} {value:g}" for name, value in of.items())
            lines += ["", f"{data}, {method}: {listed}"]
    rows = {(row["method"], row["text"]): row for row in read_rows(FILLINGS)}
    for method in dict.fromkeys(of for of, _ in rows):
        lines += ["", f"| one mask, {method} | likeliest words | accepted |", "|---|---|---|"]
        for row in _rows_of(rows, method, "singles"):
            lines.append(f"| {row['text']} | {_in_cell(row['fillings'])} | {_YES[row['accepted']]} |")
        lines += ["", f"| two masks, {method} | likeliest together | accepted | each by itself | accepted | log odds |"]
        lines += ["|---|---|---|---|---|---|"]
        for row in _rows_of(rows, method, "pairs"):
            joint = f"{_in_cell(row['fillings'])} | {_YES[row['accepted']]}"
            alone = f"{_in_cell(row['independent'])} | {_YES[row['independent_accepted']]}"
            lines.append(f"| {row['text']} | {joint} | {alone} | {row['log_odds']} |")
    return lines


_YES = {"True": "yes", "False": "no"}


def _rows_of(rows: Mapping[tuple[str, str], dict[str, str]], method: str, kind: str) -> list[dict[str, str]]:
    """Return the rows of a model in the order of the sentences."""
    return [rows[method, s["text"]] for s in sentences_of(kind) if (method, s["text"]) in rows]


def _in_cell(text: str) -> str:
    return text.replace(SEPARATOR, "; ").replace("|", "\\|")


def _claims(found: Found) -> list[str]:
    """Return rows for C3 and C9 of docs/results.md: fine-tuned and entropy, ExLM less its twin."""
    lines = []
    parts = [f"{name.upper()} {less}" for name in MOLECULES if (less := _differences(found, name, TWIN, "roc_auc"))]
    if parts:
        lines += ["", f"C3, points of ROC-AUC, ExLM less its MLM twin, one pre-training: {', '.join(parts)}"]
    for data in VALIDATION:
        model, twin = found.get((data, MODEL, OWN)), found.get((data, TWIN, OWN))
        if model and twin:
            gaps = {key: model[key] - twin[key] for key in ("loss_given_length", "entropy_bits")}
            lines += [
                "",
                f"C5 and C9 on {data}, at the recipe's mask ratio: loss given T {model['loss_given_length']:.3f} "
                f"against {twin['loss_given_length']:.3f} nats ({gaps['loss_given_length']:+.3f}); entropy "
                f"{model['entropy_bits']:.2f} against {twin['entropy_bits']:.2f} bits ({gaps['entropy_bits']:+.3f})",
            ]
    return lines
