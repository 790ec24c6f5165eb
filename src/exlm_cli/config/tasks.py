"""Task sections of fine-tuning recipes: one model per suite, chosen by the part of `task.name` before the slash."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from exlm_cli.config.base import Mark, StrictModel
from exlm_cli.errors import ConfigError

InputKind = Literal["text", "smiles"]
"""What a model reads."""
Descriptors = Literal["rdkit2d", "ecfp4"]
"""Numbers that RDKit works out of a molecule: its 2D descriptors, or the bits of an ECFP4 fingerprint."""
Pooling = Literal["auto", "cls", "mean"]
"""Which states of the encoder stand for a row."""

MISSING_VALUES: Final = ("na", "n/a", "nan", "null", "none", "-")
"""Words that say that a label is missing, in any case."""

_DEFAULT_SPLIT: Final = "scaffold"
SEEDED_SPLITS = ("random", "scaffold-balanced", "group")
"""Those that `task.split_seed` changes."""
_KEYS_OF_SPLITS: Final = {"file": "split_file", "group": "group_column", "time": "time_column"}
"""What a split reads -> the key that names it."""
_POOLING: Final = (
    "What the head reads of a row: the state at [CLS], or the mean of its states, of both texts of a pair, each read "
    "alone; `auto`: the mean of a frozen encoder of text, else [CLS]"
)


class TrainFile(StrictModel):
    """The one file of a task that splits its rows itself."""

    train: str | None = Field(None, min_length=1, description="File with all rows, or with the training rows")


class TrainValidFiles(TrainFile):
    """The files of a task without a test set."""

    valid: str | None = Field(None, min_length=1, description="File with the validation rows")


class TaskFiles(TrainValidFiles):
    """The files of a task with a test set."""

    test: str | None = Field(None, min_length=1, description="File with the test rows")


class TaskSection(StrictModel):
    """Keys that every task has; a child for each suite adds its own."""

    suite: ClassVar[str]
    tasks: ClassVar[tuple[str, ...]]
    """Full names of the tasks of this suite, like `glue/rte`."""

    name: str = Field(description="Like `moleculenet/bace`, `glue/rte`, `squad/v2`, `csv`")
    data_dir: Annotated[str | None, Mark.INPUT] = Field(
        None, min_length=1, description="Folder with the task's files; none: fetched once into the cache"
    )
    files: Annotated[TrainFile, Mark.INPUT] = TrainFile()
    sequence_length: int | None = Field(
        None,
        ge=8,
        le=65536,
        description="Tokens of a sequence, [CLS] and [SEP] included, before repetition; none: as in pre-training",
    )
    split_seed: int = Field(
        0, ge=0, lt=2**63, description="Seed of `random`, `scaffold-balanced`, `group` and `max_rows`"
    )
    on_invalid: Literal["error", "skip"] = Field("skip", description="Rows that cannot be used: stop, or skip and list")
    max_rows: int | None = Field(None, ge=1, description="Use at most this many training rows; none: all")
    max_valid_rows: int | None = Field(
        None, ge=1, description="Use at most this many validation rows (MNLI: of each of its two sets); none: all"
    )

    @property
    def input_kind(self) -> InputKind:
        """The kind of checkpoint that fits."""
        return "text"

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Column of the text or SMILES, or both columns of a pair of texts; empty where the config names none."""
        return ()

    @property
    def head_state(self) -> Pooling:
        """What the head reads of a row; of spans it reads every token."""
        return "cls"

    @property
    def molecule_descriptors(self) -> tuple[Descriptors, ...]:
        """Descriptors of molecules that the model's head reads beside the encoder's state."""
        return ()

    @property
    def number_columns(self) -> tuple[str, ...]:
        """Columns of numbers that the head reads as well."""
        return ()

    @property
    def has_canonical_smiles(self) -> bool:
        """Whether the model reads RDKit's canonical SMILES."""
        return False

    @property
    def reads_parents(self) -> bool:
        """Whether the model reads the parents of molecules instead of salts."""
        return False

    @property
    def is_log10(self) -> bool:
        """Whether the values that are predicted are logarithms of those of the file."""
        return False

    @property
    def is_split_by_seed(self) -> bool:
        """Whether another `split_seed` gives another split."""
        return False


class RowTaskConfig(TaskSection):
    """Keys of tasks with one molecule or text per row that split their rows themselves."""

    split: Literal["scaffold", "scaffold-deepchem", "scaffold-balanced", "random", "group", "time", "file"] = Field(
        _DEFAULT_SPLIT,
        description="How rows are cut 80/10/10: `scaffold` as Uni-Mol does; `group`: whole groups of "
        "`task.group_column`; `time`: the latest of `task.time_column` are tested; `file`: as `task.split_file` says",
    )
    split_file: Annotated[str | None, Mark.INPUT] = Field(
        None, min_length=1, description="JSON with the row numbers of `train`, `valid` and `test`"
    )
    smiles_column: str | None = Field(None, description="Column with the SMILES; none: the task's usual column")
    canonical_smiles: bool = Field(
        True,
        description="Read RDKit's canonical SMILES without atom-map numbers, not the SMILES as written, whose spelling "
        "may give labels away: eight counts of characters reach ROC-AUC 0.92 on BBBP and 0.99 on ClinTox",
    )
    standardise: Literal["none", "parent"] = Field(
        "none", description="`parent`: read the largest fragment of a molecule, uncharged, instead of its salt"
    )
    class_weights: Literal["none", "balanced"] = Field(
        "none", description="`balanced`: rarer classes weigh more, as in scikit-learn"
    )
    descriptors: tuple[Descriptors, ...] = Field(
        (), description="What the head reads of a molecule beside the encoder's state: rdkit2d, ecfp4 or both"
    )
    pooling: Pooling = Field("auto", description=_POOLING)

    @property
    def head_state(self) -> Pooling:
        """What the head reads of a row."""
        return self.pooling

    @property
    def molecule_descriptors(self) -> tuple[Descriptors, ...]:
        """Descriptors of molecules that the model's head reads beside the encoder's state."""
        return self.descriptors

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Column of the SMILES; empty where the config names none."""
        return () if self.smiles_column is None else (self.smiles_column,)

    @property
    def has_canonical_smiles(self) -> bool:
        """Whether the model reads RDKit's canonical SMILES; a text is never rewritten."""
        return self.canonical_smiles and self.input_kind == "smiles"

    @property
    def reads_parents(self) -> bool:
        """Whether the model reads the parents of molecules instead of salts."""
        return self.standardise == "parent"

    @property
    def is_split_by_seed(self) -> bool:
        """Whether another `split_seed` gives another split."""
        return self.split in SEEDED_SPLITS

    @property
    def is_split_by_scaffold(self) -> bool:
        """Whether molecules are split by their scaffolds."""
        return self.split.startswith("scaffold")

    def _check_molecules(self) -> None:
        if self.reads_parents and not self.canonical_smiles:
            raise ValueError(
                "`task.standardise: parent` cannot be combined with `task.canonical_smiles: false`: a parent has no "
                "SMILES as written"
            )

    def _check_split(self) -> None:
        for split, key in _KEYS_OF_SPLITS.items():
            is_given = getattr(self, key, None) is not None
            if self.split == split and key not in type(self).model_fields:
                raise ValueError(f"`task.split: {split}` is for {' and '.join(suites_with(key))}")
            if self.split == split and not is_given:
                raise ValueError(f"`task.split: {split}` needs `task.{key}`")
            if self.split != split and is_given:
                raise ValueError(f"`task.{key}` is read by `task.split: {split}`, but `task.split` is `{self.split}`")


class MoleculeNetTaskConfig(RowTaskConfig):
    """One of the MoleculeNet sets of Table 1."""

    suite: ClassVar[str] = "moleculenet"
    tasks: ClassVar[tuple[str, ...]] = tuple(
        f"moleculenet/{name}" for name in ("bace", "bbbp", "clintox", "tox21", "toxcast", "sider", "muv")
    )

    @property
    def input_kind(self) -> InputKind:
        """SMILES."""
        return "smiles"

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        self._check_split()
        self._check_molecules()
        return self


class GlueTaskConfig(TaskSection):
    """One of the GLUE tasks of Table 3."""

    suite: ClassVar[str] = "glue"
    tasks: ClassVar[tuple[str, ...]] = tuple(
        f"glue/{name}" for name in ("mnli", "qqp", "qnli", "sst2", "cola", "rte", "mrpc", "stsb")
    )

    files: Annotated[TaskFiles, Mark.INPUT] = TaskFiles()
    pooling: Pooling = Field("auto", description=_POOLING)

    @property
    def head_state(self) -> Pooling:
        """What the head reads of a row."""
        return self.pooling

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        files = self.files
        if files != TaskFiles() and (files.train is None or files.valid is None):
            missing = "train" if files.train is None else "valid"
            raise ValueError(f"`task.files.{missing}` is missing: `train` and `valid` are both needed")
        return self


class SquadTaskConfig(TaskSection):
    """SQuAD 2.0."""

    suite: ClassVar[str] = "squad"
    tasks: ClassVar[tuple[str, ...]] = ("squad/v2",)

    files: Annotated[TrainValidFiles, Mark.INPUT] = TrainValidFiles()
    valid_articles: tuple[str, ...] = Field(
        (), description="Without a validation file: titles of the articles to hold out; empty: the last two"
    )
    doc_stride: int = Field(128, ge=1, description="Tokens between the starts of two windows of a passage")
    max_query_tokens: int = Field(64, ge=1, description="Tokens of a question; the rest is cut")
    max_answer_tokens: int = Field(30, ge=1, description="Tokens of the longest answer")

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        if self.files.valid is not None and self.files.train is None:
            raise ValueError("`task.files.valid` is given without `task.files.train`")
        if self.files.valid is not None and self.valid_articles:
            raise ValueError(
                "`task.valid_articles` cannot be combined with `task.files.valid`, on which the run is scored"
            )
        return self


def _name_null(words: Any) -> Any:
    """Return a list of words with the word `null`, which YAML reads as no value."""
    return ["null" if word is None else word for word in words] if isinstance(words, list | tuple) else words


class CsvTaskConfig(RowTaskConfig):
    """A table of the user's: molecules or texts, with labels, classes or values."""

    suite: ClassVar[str] = "csv"
    tasks: ClassVar[tuple[str, ...]] = ("csv",)

    files: Annotated[TaskFiles, Mark.INPUT] = TaskFiles()
    split_column: str | None = Field(
        None, description="Column that says train, valid or test of each row; instead of `task.split`"
    )
    group_column: str | None = Field(
        None,
        description="Column whose equal cells are a group, such as a series, which `task.split: group` keeps whole",
    )
    time_column: str | None = Field(
        None, description="Column of dates such as 2024-05-31, or of numbers, by which `task.split: time` cuts"
    )
    text_column: str | tuple[str, str] | None = Field(
        None, description="Column with the text, or the two columns of pairs of texts"
    )
    label_columns: tuple[str, ...] = Field((), description="Columns with the labels")
    descriptor_columns: tuple[str, ...] = Field(
        (), description="Columns of numbers that the head reads beside the encoder's state"
    )
    label_kind: Literal["auto", "classes", "multi_label", "regression"] = Field(
        "auto", description="What labels are; `auto`: found from the data"
    )
    log10: bool = Field(False, description="Train and score decimal logarithms of the values, such as those of an IC50")
    replicates: Literal["mean", "keep"] = Field(
        "keep", description="Rows of one molecule or text: `mean`: average their values, `keep`: use each"
    )
    weight_column: str | None = Field(None, description="Column of numbers, 0 or more: what rows weigh in the training")
    decimal_comma: bool = Field(
        False,
        description="Read numbers with a decimal comma, such as 1,5; where the delimiter is no comma, they are found",
    )
    missing_values: Annotated[tuple[str, ...], BeforeValidator(_name_null)] = Field(
        MISSING_VALUES, description="Words that say, in any case, that a label is missing; an empty cell is too"
    )
    positive_class: str | None = Field(
        None, description="The positive one of two classes; none: found from their names, else the later one"
    )

    @property
    def input_kind(self) -> InputKind:
        """Text where a column of text is named, else SMILES."""
        return "smiles" if self.text_column is None else "text"

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Column of the text or SMILES, or both columns of a pair of texts; empty where the config names none."""
        if self.text_column is None:
            return super().input_columns
        return (self.text_column,) if isinstance(self.text_column, str) else self.text_column

    @property
    def number_columns(self) -> tuple[str, ...]:
        """Columns of numbers that the head reads beside the encoder's state."""
        return self.descriptor_columns

    @property
    def is_log10(self) -> bool:
        """Whether the values that are predicted are logarithms of those of the file."""
        return self.log10

    @property
    def is_split_by_seed(self) -> bool:
        """Whether another `split_seed` gives another split; texts are split at random."""
        if self.split_column is not None or self.files.valid is not None:
            return False
        return super().is_split_by_seed or (self.text_column is not None and self.split == _DEFAULT_SPLIT)

    @property
    def is_split_by_scaffold(self) -> bool:
        """Whether molecules are split by their scaffolds, not by a column or files."""
        return super().is_split_by_scaffold and self.split_column is None and self.files.valid is None

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        self._check_split()
        self._check_molecules()
        if self.text_column is not None:
            self._check_text()
        if self.files.test is not None and self.files.valid is None:
            raise ValueError("`task.files.test` is given without `task.files.valid`, on which the best epoch is chosen")
        if self.split_column is not None and self.files.valid is not None:
            raise ValueError("`task.split_column` cannot be combined with `task.files.valid`: the files are the splits")
        instead = "split_column" if self.split_column is not None else "files.valid" if self.files.valid else None
        if instead is not None and self.split != _DEFAULT_SPLIT:
            raise ValueError(
                f"`task.split: {self.split}` cannot be combined with `task.{instead}`, which splits the rows"
            )
        if self.positive_class is not None and self.label_kind in ("multi_label", "regression"):
            raise ValueError(f"`task.positive_class` is for two classes; `task.label_kind: {self.label_kind}` has none")
        if self.positive_class is not None and len(self.label_columns) > 1:
            raise ValueError("`task.positive_class` is for one column of classes; `task.label_columns` gives several")
        for name in self.label_columns:
            if self.label_columns.count(name) > 1:
                raise ValueError(f"`task.label_columns` gives `{name}` twice")
        for name in self.descriptor_columns:
            if name in self.label_columns:
                raise ValueError(f"`task.descriptor_columns`: `{name}` cannot be descriptor and label at once")
        return self

    def _check_text(self) -> None:
        if len(set(self.input_columns)) < len(self.input_columns):
            raise ValueError(f"`task.text_column` names `{self.input_columns[0]}` twice")
        if self.smiles_column is not None:
            raise ValueError(
                f"`task.smiles_column` is `{self.smiles_column}` and `task.text_column` is `{self.input_columns[0]}`: "
                "a row is one or the other"
            )
        if self.is_split_by_scaffold and self.split != _DEFAULT_SPLIT:
            raise ValueError(f"`task.split: {self.split}` is for molecules; the task has text")
        if self.reads_parents:
            raise ValueError("`task.standardise: parent` is for molecules; the task has text")
        if self.descriptors:
            raise ValueError(
                f"`task.descriptors: {list(self.descriptors)}` is for molecules; the task has text: take `csv-encoder`"
            )


SUITES: dict[str, type[TaskSection]] = {
    section.suite: section for section in (MoleculeNetTaskConfig, GlueTaskConfig, SquadTaskConfig, CsvTaskConfig)
}
"""The section of each suite."""


def check_task_name(name: str) -> None:
    """Check that there is a task, like `glue/rte`.

    Raises:
        ConfigError: There is no such task; the hint names the nearest one.
    """
    section = SUITES.get(name.partition("/")[0])
    if section is not None and name in section.tasks:
        return
    names = [task for each in SUITES.values() for task in each.tasks]
    plain = name.lower().replace("-", "").replace("_", "")
    near = [task for task in names if task.endswith(f"/{plain}")] or difflib.get_close_matches(plain, names, 1, 0.5)
    if name.startswith("csv/"):
        hint = "name the task of a file of your own `csv`, and the file with `--set task.files.train=FILE`"
    elif near:
        hint = f"did you mean `{near[0]}`?"
    else:
        hint = f"for example `{names[0]}`"
    accepted = names if section is None else section.tasks
    raise ConfigError(f"unknown task `{name}`; accepted: {', '.join(accepted)}", hint)


def keys_of(section: type[TaskSection]) -> set[str]:
    """Return the keys of a section, those of its files as `files.train`."""
    files = section.model_fields["files"].annotation
    assert isinstance(files, type)
    assert issubclass(files, TrainFile)
    return {*section.model_fields, *(f"files.{name}" for name in files.model_fields)}


def given_keys(task: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys that are given in a section, those of its files as `files.train`."""
    for key, value in task.items():
        yield from (f"files.{name}" for name in value) if key == "files" and isinstance(value, Mapping) else (key,)


def suites_with(key: str) -> list[str]:
    """Return the suites whose sections have a key."""
    return [suite for suite, section in SUITES.items() if key in keys_of(section)]


def _suite_of(task: Any) -> str | None:
    name = task.get("name") if isinstance(task, Mapping) else getattr(task, "name", None)
    return name.partition("/")[0] if isinstance(name, str) else None


def _check_before(task: Any) -> Any:
    """Refuse an unknown task, and a key of another suite, which would have no effect."""
    if not isinstance(task, Mapping):
        return task
    name = task.get("name")
    if not isinstance(name, str):
        what = "is missing" if name is None else f"is {name!r}, not a string"
        raise ValueError(f"`task.name` {what}; give a task like `moleculenet/bace`, `glue/rte`, `squad/v2` or `csv`")
    try:
        check_task_name(name)
    except ConfigError as error:
        raise ValueError(f"`task.name`: {error.message}; {error.hint}") from None
    own = keys_of(SUITES[name.partition("/")[0]])
    for key in given_keys(task):
        suites = suites_with(key)
        if suites and key not in own:
            raise ValueError(f"`task.{key}` is for {' and '.join(suites)}; {name} does not use it")
    return task


TaskConfig = Annotated[
    Annotated[MoleculeNetTaskConfig, Tag("moleculenet")]
    | Annotated[GlueTaskConfig, Tag("glue")]
    | Annotated[SquadTaskConfig, Tag("squad")]
    | Annotated[CsvTaskConfig, Tag("csv")],
    Discriminator(_suite_of),
    BeforeValidator(_check_before),
]
"""The section of any task."""
