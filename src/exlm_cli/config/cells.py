"""Grids of pre-training runs: what each cell trains, fine-tunes and measures. No torch here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, model_validator

from exlm_cli.config.base import Recipe, StrictModel
from exlm_cli.config.finetune import CommonFinetuneRecipe, FinetuneRecipe, Seed
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.errors import ConfigError

TaskName = Annotated[str, Field(pattern=r"^[a-z0-9]+(/[a-z0-9-]+)?$")]


class CellPlan(StrictModel):
    """One cell and seed of a grid: everything the process that works on it has to know.

    Attributes:
        label: Names its folder, `k4-p0.789`.
        row, column: Its place in the table that is shown meanwhile.
        seed: Of pre-training.
        about: What tells the cell apart in results, such as `num_repeats` and `mask_ratio`.
        pretrain: What is trained.
        finetune: One recipe for each task.
        measure_sequences: Validation sequences scored after training; none: all.
        entropy_ratios: Other mask ratios at which the entropy of predictions is measured.
    """

    label: str
    row: str
    column: str
    seed: int
    about: dict[str, Any]
    pretrain: PretrainRecipe
    finetune: tuple[FinetuneRecipe, ...]
    measure_sequences: int | None
    entropy_ratios: tuple[float, ...]

    @property
    def folder(self) -> str:
        """Under `cells/`."""
        return f"{self.label}/seed-{self.seed}"

    @property
    def work(self) -> float:
        """Positions that pre-training sends through the encoder, at most: what its time goes by."""
        train = self.pretrain.train
        sequences = train.batch_sequences or (train.batch_tokens or 0) / self.pretrain.repeated_length
        return (train.max_steps or 1) * sequences * self.pretrain.longest_expanded_length


class CellsRecipe(Recipe):
    """What every grid of pre-training runs has; a child says which cells there are."""

    decided_by: ClassVar[Mapping[str, str]] = {
        "pretrain.seed": "`--seeds`",
        "pretrain.device": "`--device`",
        "finetune.device": "`--device`",
        "finetune.task.name": "`--task`",
        "finetune.grid": "one value, like `--set finetune.optim.lr=1e-5`: cells are fine-tuned without a search",
    }

    seeds: tuple[Seed, ...] = Field((1,), min_length=1, description="Seeds of pre-training, each cell with each")
    tasks: tuple[TaskName, ...] = Field(
        (), description="Tasks every cell is fine-tuned on, like glue/mnli; empty: none"
    )
    measure_sequences: int | None = Field(
        None, ge=1, description="Validation sequences scored after training; none: all"
    )
    entropy_ratios: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = Field(
        (), description="Other mask ratios at which the entropy of predictions is measured"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the models run")
    pretrain: PretrainRecipe = Field(description="What the cells have in common: a recipe of `exlm pretrain`")
    finetune: CommonFinetuneRecipe = Field(
        description="How cells are fine-tuned on each of `tasks`, with seeds of its own"
    )

    def resume_command(self, run: Path) -> str:
        """Return what goes on with a run of this recipe."""
        return f"exlm {self.command} --resume {run}"

    def plan(self) -> list[CellPlan]:
        """Return every cell with every seed, in the order of the recipe."""
        return [plan for seed in self.seeds for plan in self.plan_seed(seed)]

    def plan_seed(self, seed: int) -> list[CellPlan]:
        """Return every cell with one seed."""
        raise NotImplementedError

    def together_with(self, earlier: Self) -> Self:
        """Return this recipe with the cells, seeds and tasks that `earlier` has besides its own.

        Raises:
            ConfigError: A cell of `earlier` does not go with what this recipe has in common.
        """
        raise NotImplementedError

    def _joined(self, earlier: Self, cells: dict[str, tuple[Any, ...]]) -> Self:
        seeds = tuple(dict.fromkeys((*earlier.seeds, *self.seeds)))
        tasks = tuple(dict.fromkeys((*earlier.tasks, *self.tasks)))
        try:
            return self.model_validate(self.model_dump() | {"seeds": seeds, "tasks": tasks} | cells)
        except ValidationError as error:
            said = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise ConfigError(
                f"the cells that this run has already do not go with the changed recipe: {said}",
                "choose another `--out` for a changed recipe",
            ) from None

    @model_validator(mode="after")
    def _check_cells(self) -> Self:
        for name, values in (("seeds", self.seeds), ("tasks", self.tasks)):
            if len(set(values)) < len(values):
                raise ValueError(f"`{name}` {list(values)} names one of them twice")
        self._check_task_keys()
        self.plan_seed(self.seeds[0])
        return self

    def _check_task_keys(self) -> None:
        """Refuse what no task would follow, and files that several tasks would share."""
        names = self.tasks or (self.finetune.task.name,)
        self.finetune.task.refuse_unused(names)
        if len(self.tasks) > 1 and any(self.finetune.task.files.model_dump().values()):
            raise ValueError(
                f"`finetune.task.files` names the files of one task; there are {len(self.tasks)}: "
                f"{', '.join(self.tasks)}"
            )
        if not self.tasks:
            self._finetune(self.finetune.task.name)

    def _cell(
        self, label: str, row: str, column: str, seed: int, about: dict[str, Any], changes: dict[str, Any]
    ) -> CellPlan:
        """Return a cell whose pre-training differs from the common one by `changes`, values by dotted key."""
        shared = {"name": f"{self.name}-{label}", "seed": seed, "device": self.device}
        # one thread whatever the number of processes: sums in another order would be other numbers
        threads = {"train.num_threads": self.pretrain.train.num_threads or 1}
        content = _changed(self.pretrain.model_dump(), shared | threads | changes)
        try:
            pretrain = PretrainRecipe.model_validate(content)
        except ValidationError as error:
            finding = error.errors()[0]
            where = ".".join(map(str, finding["loc"]))
            said = finding["msg"].removeprefix("Value error, ")
            raise ValueError(f"cell {label}: {f'`pretrain.{where}`: ' if where else ''}{said}") from None
        return CellPlan(
            label=label,
            row=row,
            column=column,
            seed=seed,
            about=about,
            pretrain=pretrain,
            finetune=tuple(self._finetune(task) for task in self.tasks),
            measure_sequences=self.measure_sequences,
            entropy_ratios=self.entropy_ratios,
        )

    def _finetune(self, task: str) -> FinetuneRecipe:
        train = self.finetune.train.model_dump() | {"num_threads": self.finetune.train.num_threads or 1}
        return self.finetune.of_task(task, {"device": self.device, "train": train})


def _changed(content: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return nested values with some of them replaced, by dotted key."""
    changed = dict(content)
    for path, value in changes.items():
        first, _, rest = path.partition(".")
        changed[first] = _changed(changed[first], {rest: value}) if rest else value
    return changed
