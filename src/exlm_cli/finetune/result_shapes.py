"""What files of results must hold before anybody reads them: what a later version adds is let through."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from exlm_cli.errors import CheckpointError

_SHOWN_CHARACTERS = 60


class WrittenModel(BaseModel):
    """Keys that must be there, with values of exactly these types."""

    model_config = ConfigDict(extra="allow", strict=True)


class WrittenSummary(WrittenModel):
    """One metric over seeds (`tasks.results.Summary`)."""

    mean: float | None
    std: float | None
    median: float | None
    values: list[float | None]


class WrittenInit(WrittenModel):
    """What fine-tuning began with."""

    recipe: str
    objective: str
    checkpoint: str | None
    steps: int
    tokens: int


class WrittenGridBest(WrittenModel):
    """The best point of a grid."""

    label: str
    values: dict[str, Any]


class WrittenYardstick(WrittenModel):
    """Scores of a random forest on the same rows."""

    name: str
    metrics: dict[str, dict[str, WrittenSummary]]


class WrittenResults(WrittenModel):
    """`results.json` of a fine-tuning run."""

    task: str
    input_kind: Literal["text", "smiles"]
    loss: str
    output_names: list[str]
    init: WrittenInit
    parameters: int
    split: str
    split_sizes: dict[str, int]
    split_sha256: str
    selection_metric: str
    is_greater_better: bool
    aggregate: Literal["mean", "median"]
    seeds: list[int] = Field(min_length=1)
    metrics: dict[str, dict[str, WrittenSummary]]
    grid_best: WrittenGridBest | None
    yardstick: WrittenYardstick | None = None

    @model_validator(mode="after")
    def _check_selection(self) -> Self:
        if self.selection_metric not in self.metrics.get("valid", {}):
            raise ValueError(f"`metrics.valid` has no `{self.selection_metric}`, by which the best epoch was chosen")
        return self


class WrittenCell(WrittenModel):
    """`result.json` of one seed at one grid point of a fine-tuning run."""

    parameters: int
    epochs: int
    best_epoch: int
    elapsed_s: float
    tokens_per_s: float
    outside_model_share: float
    metrics: dict[str, dict[str, float | None]]

    @model_validator(mode="after")
    def _check_splits(self) -> Self:
        if "valid" not in self.metrics:
            raise ValueError("`metrics.valid` is missing")
        return self


class WrittenRun(WrittenModel):
    """`run.json` of a fine-tuning run that is to go on."""

    data_fingerprint: str
    checkpoint_sha256: str
    checkpoint: str | None = None


class WrittenEntropy(WrittenModel):
    """Entropy of a cell at one mask ratio."""

    mask_ratio: float


class WrittenMeasures(WrittenModel):
    """What is measured of the model of a cell of a grid."""

    pretrain_identity: str
    steps: int
    elapsed_s: float
    parameters: int
    metrics: dict[str, float | None]
    entropy: list[WrittenEntropy]


class WrittenScore(WrittenModel):
    """Scores of a cell on one task, or why there are none."""

    diverged: str | None = None
    metric: str | None = None
    values: list[float | None] | None = None

    @model_validator(mode="after")
    def _check_scores(self) -> Self:
        _refuse_missing(self, self.diverged, "metric", "values")
        return self


class WrittenGridCell(WrittenModel):
    """`result.json` of one cell and seed of a grid of pre-training runs."""

    seed: int
    diverged: str | None = None
    steps: int | None = None
    metrics: dict[str, float | None] | None = None
    entropy: list[WrittenEntropy] = []
    finetune: dict[str, WrittenScore] | None = None

    @model_validator(mode="after")
    def _check_figures(self) -> Self:
        _refuse_missing(self, self.diverged, "steps", "metrics", "finetune")
        return self


class WrittenOwnCell(WrittenGridCell):
    """The same, of a grid that is to go on."""

    pretrain_identity: str


def check_written(path: Path, content: object, shape: type[WrittenModel], hint: str) -> dict[str, Any]:
    """Return the content of a file, if it holds what it must.

    Args:
        path: Named where it does not.
        content: As JSON has it.
        shape: What it must hold.
        hint: What to do where it does not.

    Raises:
        CheckpointError: It is no JSON object, lacks a key, or has a value of another type there.
    """
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, a JSON object is expected", hint)
    try:
        shape.model_validate(content)
    except ValidationError as error:
        finding = error.errors()[0]
        said = finding["msg"].removeprefix("Value error, ")
        if finding["type"] == "model_type":
            said = "a JSON object is expected"
        key = ".".join(map(str, finding["loc"]))
        if finding["type"] == "missing":
            said = f"`{key}` is missing"
        elif finding["type"] == "value_error":
            said = f"`{key}`: {said}" if key else said
        else:
            shown = repr(finding["input"])
            shown = shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[: _SHOWN_CHARACTERS - 3]}..."
            said = f"`{key}` is {shown}: {said[0].lower()}{said[1:]}"
        raise CheckpointError(f"{path}: {said}", hint) from None
    return content


def _refuse_missing(written: WrittenModel, diverged: str | None, *keys: str) -> None:
    """Refuse what came to its end and lacks a key."""
    for key in keys:
        if diverged is None and getattr(written, key) is None:
            raise ValueError(f"`{key}` is missing")
