"""The fine-tuning recipe: a task, what of the model and its training is set anew, seeds, and a grid. No torch here."""

from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, ValidationError, model_validator

from exlm_cli.config.base import Recipe, StrictModel
from exlm_cli.config.sections import OptimConfig

Seed = Annotated[int, Field(ge=0, lt=2**63)]

_DEFAULT_SPLIT: Final = "scaffold"
_TABLE_KEYS = ("split", "split_file", "smiles_column", "canonical_smiles", "class_weights")

KEYS_OF_SUITES: dict[str, tuple[str, ...]] = {
    "moleculenet": _TABLE_KEYS,
    "csv": (*_TABLE_KEYS, "files.valid", "files.test", "split_column", "text_column", "label_columns", "label_kind"),
    "glue": ("files.valid", "files.test"),
    "squad": ("files.valid", "files.test", "valid_articles", "doc_stride", "max_query_tokens", "max_answer_tokens"),
}
"""Keys of `task` that some suites use and others do not; the rest is everybody's."""


class TaskFiles(StrictModel):
    """The files of a task; which of them a task needs is the task's own rule."""

    train: str | None = Field(None, description="File with the training rows, or with all rows where the task splits")
    valid: str | None = Field(None, description="File with the validation rows")
    test: str | None = Field(None, description="File with the test rows")


class TaskConfig(StrictModel):
    """Which data set, how it is cut into splits and tokens, and how its labels are read."""

    name: str = Field(
        pattern=r"^[a-z0-9]+(/[a-z0-9-]+)?$", description="Like `moleculenet/bace`, `glue/rte`, `squad/v2`, `csv`"
    )
    data_dir: str | None = Field(None, description="Folder with the task's files; none: fetched once into the cache")
    files: TaskFiles = TaskFiles()
    sequence_length: int | None = Field(
        None,
        ge=8,
        le=65536,
        description="Tokens of a sequence, [CLS] and [SEP] included, before repetition; none: as in pre-training",
    )
    split: Literal["scaffold", "scaffold-chiral", "scaffold-deepchem", "scaffold-balanced", "random", "file"] = Field(
        _DEFAULT_SPLIT,
        description="How rows are cut 80/10/10: `scaffold` as Uni-Mol does; `file`: as `task.split_file` says",
    )
    split_column: str | None = Field(
        None, description="CSV: column that says train, valid or test of each row; instead of `task.split`"
    )
    split_file: str | None = Field(None, description="JSON with the row numbers of `train`, `valid` and `test`")
    split_seed: int = Field(0, ge=0, lt=2**63, description="Of `random` and `scaffold-balanced`")
    smiles_column: str | None = Field(None, description="Column with the SMILES; none: the one the task is known for")
    canonical_smiles: bool = Field(
        False, description="Let the model read RDKit's canonical SMILES, not how the file writes a molecule"
    )
    text_column: str | None = Field(None, description="Column with the text")
    label_columns: tuple[str, ...] = Field((), description="Columns with the labels")
    label_kind: Literal["auto", "classes", "multi_label", "regression"] = Field(
        "auto", description="What labels are; `auto`: found from the data"
    )
    class_weights: Literal["none", "balanced"] = Field(
        "none", description="`balanced`: rarer classes weigh more, as in scikit-learn"
    )
    on_invalid: Literal["error", "skip"] = Field("skip", description="Rows that cannot be used: stop, or skip and list")
    max_rows: int | None = Field(None, ge=1, description="Use at most this many training rows; none: all")
    valid_articles: tuple[str, ...] = Field(
        (), description="SQuAD without a validation file: titles of the articles to hold out; empty: the last two"
    )
    doc_stride: int = Field(128, ge=1, description="SQuAD: tokens between the starts of two windows of a passage")
    max_query_tokens: int = Field(64, ge=1, description="SQuAD: tokens of a question; the rest is cut")
    max_answer_tokens: int = Field(30, ge=1, description="SQuAD: tokens of the longest answer")

    @property
    def suite(self) -> str:
        """The part before the slash: `moleculenet`, `glue`, `squad`, `csv`."""
        return self.name.partition("/")[0]

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        for name in TaskFiles.model_fields:
            if getattr(self.files, name) == "":
                raise ValueError(f"`task.files.{name}` is an empty text; give a file or null")
        if self.canonical_smiles and (self.suite in ("glue", "squad") or self.text_column is not None):
            raise ValueError("`task.canonical_smiles` is for molecules; the task has text")
        self._refuse_unused()
        if self.split == "file" and self.split_file is None:
            raise ValueError("`task.split: file` needs `task.split_file`")
        if self.split != "file" and self.split_file is not None:
            raise ValueError(f"`task.split_file` is read by `task.split: file`, but `task.split` is `{self.split}`")
        if self.text_column is not None and self.split not in (_DEFAULT_SPLIT, "random", "file"):
            raise ValueError(f"`task.split: {self.split}` is for molecules; the task has text")
        instead = "split_column" if self.split_column is not None else "files.valid" if self.files.valid else None
        if instead is not None and self.split != _DEFAULT_SPLIT:
            raise ValueError(f"`task.split: {self.split}` does not go with `task.{instead}`, which splits the rows")
        return self

    def _refuse_unused(self) -> None:
        """Refuse a key that the task passes over; one of another suite must never seem to have been followed."""
        if self.suite not in KEYS_OF_SUITES:
            return  # no such suite: whoever loads the task says which there are
        for key, suites in self.keys_of_some_suites().items():
            if self.suite not in suites:
                raise ValueError(f"`task.{key}` is for {' and '.join(suites)}; {self.name} does not use it")

    def keys_of_some_suites(self) -> dict[str, list[str]]:
        """Return the keys that are given and that not every suite uses, each with the suites that do."""
        own = {name: getattr(self, name) != field.default for name, field in type(self).model_fields.items()}
        of_files = {f"files.{name}": getattr(self.files, name) is not None for name in TaskFiles.model_fields}
        using = {
            key: [suite for suite, keys in KEYS_OF_SUITES.items() if key in keys]
            for key, is_given in (own | of_files).items()
            if is_given
        }
        return {key: suites for key, suites in using.items() if suites}


class CommonTaskConfig(TaskConfig):
    """What the tasks of a grid have in common: each task takes the keys that its suite uses."""

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        """Leave the rules to `of_task`: which suites there are, only the grid's tasks say."""
        return self

    def of_task(self, name: str) -> dict[str, Any]:
        """Return the values of one task, without the keys that its suite does not use."""
        suite = name.partition("/")[0]
        content = self.model_dump() | {"name": name}
        for key, suites in self.keys_of_some_suites().items():
            if suite in KEYS_OF_SUITES and suite not in suites:
                section, _, leaf = key.rpartition(".")
                del (content[section] if section else content)[leaf]
        return content


class FinetuneModelConfig(StrictModel):
    """What fine-tuning sets anew of the model; its architecture is the checkpoint's."""

    dropout: float | None = Field(None, ge=0, lt=1, description="As in pre-training; none: the checkpoint's")
    attention_dropout: float | None = Field(None, ge=0, lt=1, description="As in pre-training; none: the checkpoint's")
    activation_dropout: float | None = Field(None, ge=0, lt=1, description="As in pre-training; none: the checkpoint's")
    pooler_dropout: float = Field(0.1, ge=0, lt=1, description="Dropout before both layers of the task head")


class FinetuneTrainConfig(StrictModel):
    """How long, how much at once, and what is kept."""

    max_epochs: int = Field(10, ge=1, le=100_000, description="Passes over the training rows")
    max_steps: int | None = Field(None, ge=1, description="Optimiser steps; the earlier of the two ends the run")
    patience: int | None = Field(
        None, ge=1, description="Stop after this many validations without a better one; none: never"
    )
    batch_sequences: int = Field(32, ge=1, description="Sequences of a step")
    bucket_steps: int = Field(16, ge=1, description="Steps whose sequences are sorted by length together; 1: never")
    microbatch_tokens: int = Field(16384, ge=8, description="Tokens, padding included, that go through at once")
    validate_every_steps: int | None = Field(None, ge=1, description="Steps between validations; none: each epoch")
    checkpoint_every_steps: int | None = Field(None, ge=1, description="Steps between checkpoints; none: each epoch")
    keep_last: int = Field(1, ge=1, le=1000, description="Checkpoints to resume from; the best one is kept besides")
    log_every_steps: int = Field(10, ge=1, description="Steps between rows of metrics.jsonl")
    precision: Literal["auto", "fp32", "bf16"] = Field("auto", description="auto: bf16 autocast on CUDA, fp32 on CPU")
    compile: bool = Field(False, description="torch.compile the encoder")
    num_threads: int | None = Field(None, ge=1, le=1024, description="CPU threads; none: torch's choice")


class FinetuneRecipe(Recipe):
    """Everything a fine-tuning run depends on besides its checkpoint.

    `seeds` stands where a pre-training recipe has `seed`: each seed decides the head's weights, the order of the data
    and dropout of one fine-tuning, and all weights of one with `init: scratch`.
    """

    command: ClassVar[str] = "finetune"
    folder: ClassVar[str] = "finetune"
    groups: ClassVar[tuple[str, ...]] = ("moleculenet", "glue", "squad", "repeated-mlm", "csv")
    example: ClassVar[str] = "moleculenet-bace"

    seeds: tuple[Seed, ...] = Field((1, 2, 3), min_length=1, description="One fine-tuning for each of them")
    aggregate: Literal["mean", "median"] = Field("mean", description="What of the seeds is reported first")
    init: Literal["checkpoint", "scratch"] = Field(
        "checkpoint", description="`scratch`: the checkpoint's architecture and tokenizer, weights drawn from the seed"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the model runs")
    task: TaskConfig
    model: FinetuneModelConfig = FinetuneModelConfig()
    optim: OptimConfig
    train: FinetuneTrainConfig = FinetuneTrainConfig()
    grid: dict[str, tuple[Any, ...]] = Field(
        default={}, description="Values to try by key of `model`, `optim` or `train`; `--grid` tries each combination"
    )

    @model_validator(mode="after")
    def _check_across_sections(self) -> Self:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"`seeds` {list(self.seeds)} names a seed twice")
        for name, without in (("transition_lr_scale", 1), ("transition_start_ratio", 0)):
            if getattr(self.optim, name) != without:
                raise ValueError(f"`optim.{name}` is pre-training's: fine-tuning has no transition head")
        if self.train.max_steps is not None and self.optim.warmup_steps > self.train.max_steps:
            raise ValueError(
                f"`optim.warmup_steps` {self.optim.warmup_steps} is more than `train.max_steps` {self.train.max_steps}"
            )
        return self


class CommonFinetuneRecipe(FinetuneRecipe):
    """How the cells of a grid are fine-tuned, on whichever tasks the grid names."""

    task: CommonTaskConfig

    def of_task(self, name: str, changes: dict[str, Any]) -> FinetuneRecipe:
        """Return the recipe of one task.

        Args:
            name: Of the task.
            changes: Values by section or key that replace its own.

        Raises:
            ValueError: What the tasks have in common does not go with this one; the message is for users.
        """
        content = self.model_dump() | {"name": name.replace("/", "-"), "task": self.task.of_task(name)} | changes
        try:
            return FinetuneRecipe.model_validate(content)
        except ValidationError as error:
            said = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise ValueError(f"`finetune` on {name}: {said}") from None
