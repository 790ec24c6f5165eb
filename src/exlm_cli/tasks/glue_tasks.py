"""The eight tasks of GLUE: their columns, classes, sizes and scores (App. M of the paper)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Columns:
    """Where one layout of a task has its one or two texts and its label."""

    texts: tuple[str, ...]
    label: str


@dataclass(frozen=True)
class GlueTaskInfo:
    """One task.

    Attributes:
        name: As in `glue/rte`, which is the Hub's configuration too.
        folder: Its folder in the official download.
        layouts: Columns of the official TSV, and of the Hub where those are others.
        classes: Names of the classes in the Hub's order; none for STS-B, which is a number from 0 to 5.
        metrics: Scores that GLUE asks for; the first one chooses the best epoch and stands in Table 3.
        num_train, num_valid: Rows of the official files; of MNLI the matched ones are counted.
        header: Columns of the official TSV where that has no header line.
        has_numbered_classes: The official files and predictions have classes by number, not by name.
    """

    name: str
    folder: str
    layouts: tuple[Columns, ...]
    classes: tuple[str, ...]
    metrics: tuple[str, ...]
    num_train: int
    num_valid: int
    header: tuple[str, ...] | None = None
    has_numbered_classes: bool = False


_PAIR = ("sentence1", "sentence2")
_ENTAILED = ("entailment", "not_entailment")

GLUE_TASKS = {
    info.name: info
    for info in (
        GlueTaskInfo(
            "mnli",
            "MNLI",
            (Columns(_PAIR, "gold_label"), Columns(("premise", "hypothesis"), "label")),
            ("entailment", "neutral", "contradiction"),
            ("accuracy",),
            392_702,
            9_815,
        ),
        GlueTaskInfo(
            "qqp",
            "QQP",
            (Columns(("question1", "question2"), "is_duplicate"), Columns(("question1", "question2"), "label")),
            ("not_duplicate", "duplicate"),
            ("accuracy", "f1"),
            363_846,
            40_430,
            has_numbered_classes=True,
        ),
        GlueTaskInfo(
            "qnli", "QNLI", (Columns(("question", "sentence"), "label"),), _ENTAILED, ("accuracy",), 104_743, 5_463
        ),
        GlueTaskInfo(
            "sst2",
            "SST-2",
            (Columns(("sentence",), "label"),),
            ("negative", "positive"),
            ("accuracy",),
            67_349,
            872,
            has_numbered_classes=True,
        ),
        GlueTaskInfo(
            "cola",
            "CoLA",
            (Columns(("sentence",), "label"),),
            ("unacceptable", "acceptable"),
            ("matthews_corrcoef", "accuracy"),
            8_551,
            1_043,
            header=("source", "label", "mark", "sentence"),
            has_numbered_classes=True,
        ),
        GlueTaskInfo("rte", "RTE", (Columns(_PAIR, "label"),), _ENTAILED, ("accuracy",), 2_490, 277),
        GlueTaskInfo(
            "mrpc",
            "MRPC",
            (Columns(("#1 String", "#2 String"), "Quality"), Columns(_PAIR, "label")),
            ("not_equivalent", "equivalent"),
            ("accuracy", "f1"),
            3_668,
            408,
            has_numbered_classes=True,
        ),
        GlueTaskInfo(
            "stsb",
            "STS-B",
            (Columns(_PAIR, "score"), Columns(_PAIR, "label")),
            (),
            ("spearmanr", "pearsonr"),
            5_749,
            1_500,
        ),
    )
}
"""By name, in the order of Table 3."""

NUM_MISMATCHED = 9_832
"""Rows of MNLI's official dev_mismatched."""

HIGHEST_SIMILARITY = 5.0
"""STS-B's scale begins at 0."""
