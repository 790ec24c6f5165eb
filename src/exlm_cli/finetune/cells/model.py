"""Models of fine-tuning: the pre-trained weights they begin with, and the fine-tuned models of a finished run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch

from exlm_cli.bundled_models import bundled_name, bundled_runs
from exlm_cli.config.base import Mark, identity_of
from exlm_cli.config.finetune import FinetuneRecipe, grid_points
from exlm_cli.config.load import load_recipe, resumed_recipe
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.tasks import InputKind
from exlm_cli.data.corpus.prepare import train_tokenizer
from exlm_cli.data.tokenizer import TOKENIZER_FILE, Tokenizer
from exlm_cli.errors import CheckpointError, ConfigError
from exlm_cli.files import ALTERED_HINT, read_json
from exlm_cli.finetune.cells.runner import TaskRunner
from exlm_cli.finetune.features import descriptor_identity, descriptor_names
from exlm_cli.finetune.results import (
    ENCODER_FILE,
    RESULTS_FILE,
    InitialWeights,
    RunResults,
    best_cell_folder,
    how_to_redo,
    read_results,
)
from exlm_cli.model.heads import Pooled, TaskModel
from exlm_cli.paths import expand_path
from exlm_cli.progress import Progress
from exlm_cli.run_dir import run_kind
from exlm_cli.tasks.base import DownstreamTask, EncodedRows, FloatArray, SeedOutputs
from exlm_cli.tasks.metrics import join_seeds, to_predictions
from exlm_cli.tasks.registry import num_texts
from exlm_cli.tasks.rows.task import RowTask
from exlm_cli.train.checkpoint import (
    STATE_FILE,
    BestState,
    best_paths,
    load_model_weights,
    require_origin,
    verify_checkpoint,
)
from exlm_cli.train.pretrained import (
    Pretrained,
    build_model,
    load_tokenizer,
    model_identity,
    pick_device,
    recorded_name,
)


@dataclass(frozen=True)
class Finetuned:
    """The models of a finished fine-tuning run: one for each seed on each split, at the split's best grid point.

    Attributes:
        encoder_recipe: Recipe of pre-training.
        sequence_length: Tokens of a sequence before repetition.
        runners: Model of each seed on the first split.
        others: The same of each further split.
        is_whole: Whether these are all seeds of the run, of whose mean the calibration is.
    """

    run: Path
    recipe: FinetuneRecipe
    encoder_recipe: PretrainRecipe
    tokenizer: Tokenizer
    sequence_length: int
    results: RunResults
    runners: dict[int, TaskRunner]
    others: tuple[dict[int, TaskRunner], ...] = ()
    is_whole: bool = True

    def only(self, seeds: Sequence[int]) -> "Finetuned":
        """Return the models of some seeds, in the order given.

        Raises:
            ConfigError: There are none, one comes twice, or the run has not all of them.
        """
        known = self.results.seeds
        is_list = isinstance(seeds, Sequence) and all(seed in known for seed in seeds)
        if not is_list or not seeds or len(set(seeds)) < len(seeds):
            raise ConfigError(
                f"`seeds={seeds}`: the run has {', '.join(map(str, known))}", "give a list of some of these, each once"
            )
        runners, *others = ({seed: of_split[seed] for seed in seeds} for of_split in (self.runners, *self.others))
        return replace(
            self,
            results=self.results.model_copy(update={"seeds": tuple(seeds)}),
            runners=runners,
            others=tuple(others),
            is_whole=self.is_whole and set(seeds) == set(known),
        )

    def run_seeds(self, encoded: EncodedRows, progress: Progress) -> SeedOutputs:
        """Return what each of the K seeds predicts for N examples.

        Those of several splits come one split after the other.
        """
        by_seed: list[FloatArray | Sequence[FloatArray]] = []
        loss, num_outputs = self.results.loss, len(self.results.output_names)
        every = [(seed, runner) for of_split in (self.runners, *self.others) for seed, runner in of_split.items()]
        first = every[0][1]
        states = None
        if len(every) > 1 and first.model.is_encoder_frozen and self.results.loss != "span" and len(encoded):
            states = first.encode(encoded, progress, "encoding")  # all models have the same encoder
        with progress.bar("models", len(every)) as bar:
            for seed, runner in every:
                outputs = runner.predict(encoded, progress, f"seed {seed}", states=states) if len(encoded) else []
                by_seed.append(to_predictions(loss, outputs, num_outputs))
                bar.update(len(by_seed))
        return join_seeds(by_seed)


def choose_tokenizer(encoder: PretrainRecipe, task: DownstreamTask, run: Path | None, progress: Progress) -> Tokenizer:
    """Return the tokenizer of a model that begins without a checkpoint.

    Without a tokenizer of its own the recipe gets that of the bundled model, which knows more than the training rows of
    a task; where the package brings none of that kind, one is trained on these rows.

    Args:
        encoder: Its pre-training recipe, which may name a tokenizer.
        task: Its training rows.
        run: The run to continue, which has a tokenizer; None: a new run.
        progress: Reports the tokenizer.

    Raises:
        ConfigError: The task has no rows of text or SMILES.
        TokenizerError: The tokenizer cannot be read or trained.
    """
    kind, given = encoder.data.kind, encoder.tokenizer.path
    path = expand_path(given) if given is not None else _bundled_tokenizer(kind)
    if run is not None:
        path = run / TOKENIZER_FILE
    elif given is None and path is not None:
        progress.message(
            f"tokenizer: that of {bundled_name(path.parent)}; `tokenizer.path` in the recipe names another"
        )
    if path is not None:
        return Tokenizer.load(path, kind, encoder.tokenizer.special_tokens)
    if isinstance(task, RowTask):
        return train_tokenizer(chain.from_iterable(task.examples["train"].texts), encoder, progress)
    raise ConfigError(f"{task.name} cannot begin without a checkpoint", "give one as `--checkpoint RUN`")


def untrained_model(encoder: PretrainRecipe, tokenizer: Tokenizer) -> Pretrained:
    """Return an untrained model of a pre-training recipe, for `init: scratch`."""
    model = build_model(encoder, tokenizer, torch.device("cpu"))
    return Pretrained(model, tokenizer, encoder, Path(encoder.name), 0, 0, sha256="scratch")


def _bundled_tokenizer(kind: InputKind) -> Path | None:
    """Return the tokenizer of the model in the package that reads rows of a kind; None without one."""
    runs = (run for run in bundled_runs() if load_recipe(run / "recipe.yaml").data.kind == kind)
    return next((run / TOKENIZER_FILE for run in runs), None)


def describe_weights(weights: Pretrained, recipe: FinetuneRecipe) -> InitialWeights:
    """Return what `results.json` holds of the weights that a fine-tuning begins with."""
    is_scratch = recipe.init == "scratch"
    masking = weights.recipe.masking
    return InitialWeights(
        checkpoint=None if is_scratch else recorded_name(weights),
        sha256=None if is_scratch else weights.sha256,
        recipe=weights.recipe.name,
        objective="scratch" if is_scratch else weights.recipe.objective,
        steps=0 if is_scratch else weights.step,
        tokens=0 if is_scratch else weights.num_tokens,
        num_states_per_mask=masking.num_states_per_mask,
        num_repeats=masking.num_repeats,
        mask_ratio=masking.mask_ratio,
    )


def cell_identity(
    recipe: FinetuneRecipe, seed: int, encoder_recipe: PretrainRecipe, tokenizer: Tokenizer
) -> dict[str, str]:
    """Return hashes of what decides a fine-tuned model besides its data and the weights it begins with.

    Args:
        recipe: Recipe of the grid point.
        seed: Seed of the cell.
        encoder_recipe, tokenizer: Recipe and tokenizer of pre-training.
    """
    encoder = model_identity(encoder_recipe, tokenizer)
    own = identity_of(recipe.model_copy(update={"seeds": (seed,), "num_replicates": 1}), without={Mark.INPUT})
    identity = {"recipe": own, "pre-training recipe": encoder["recipe"], "tokenizer": encoder["tokenizer"]}
    return identity | descriptor_identity(recipe.task)


def pooled_by(recipe: FinetuneRecipe) -> Pooled:
    """Return what the head of a recipe's model reads of a row."""
    return "cls" if not recipe.pools_mean else "mean" if num_texts(recipe.task) == 1 else "means"


def load_finetuned(run: Path, *, device: str = "auto") -> Finetuned:
    """Read the best epoch of every seed of a fine-tuning run.

    Args:
        run: Run directory.
        device: Where the models go: `auto`, `cpu` or `cuda`.

    Raises:
        CheckpointError: `run` is not a fine-tuning run or not finished, its weights are missing or damaged, or a recipe
            or the tokenizer beside them is not what they were trained with.
        ConfigError: A recipe is damaged, or there is no such device.
        TokenizerError: tokenizer.json is not a tokenizer.
    """
    if run_kind(run) == "pretrain":
        shown = bundled_name(run) or run
        raise CheckpointError(
            f"{shown} is a pre-trained run, which predicts no labels",
            f"fine-tune it with `exlm finetune`, or write its vectors with `exlm embed {shown} FILE`",
        )
    recipe = resumed_recipe(run, FinetuneRecipe, [f"device={device}"])
    results = read_results(run)
    encoder_recipe = load_recipe(run / ENCODER_FILE)
    tokenizer = load_tokenizer(run, encoder_recipe)
    torch_device = pick_device(recipe)
    length = recipe.sequence_length(encoder_recipe)
    first, *others = (
        _load_split(run, recipe, of_split, encoder_recipe, tokenizer, torch_device) for of_split in results.of_splits
    )
    return Finetuned(run, recipe, encoder_recipe, tokenizer, length, results, first, tuple(others))


def _load_split(
    run: Path,
    recipe: FinetuneRecipe,
    results: RunResults,
    encoder_recipe: PretrainRecipe,
    tokenizer: Tokenizer,
    device: torch.device,
) -> dict[int, TaskRunner]:
    """Return the model of each seed on one split."""
    num_outputs = None if results.loss == "span" else len(results.output_names)
    runners = {}
    files = {
        "recipe": run / "recipe.yaml",
        "pre-training recipe": run / ENCODER_FILE,
        "tokenizer": run / TOKENIZER_FILE,
    }
    best_recipe, num_descriptors = _recipe_of_best(run, recipe, results), len(descriptor_names(recipe.task))
    for seed in results.seeds:
        best = _best_weights(best_cell_folder(run, results, seed))
        identity = cell_identity(best_recipe, seed, encoder_recipe, tokenizer)
        saved = read_json(best / STATE_FILE, BestState).identity
        require_origin(best, saved, identity, files)
        if saved.get("descriptors") != identity.get("descriptors"):
            raise CheckpointError(
                f"{best}: this version of RDKit has other descriptors than the one it was trained with",
                "install the version of RDKit of then, or fine-tune again",
            )
        sizes = (tokenizer.vocab_size, num_outputs, num_descriptors)
        model = TaskModel(encoder_recipe, best_recipe.model, *sizes, pooled=pooled_by(best_recipe))
        load_model_weights(best, model)
        if best_recipe.train.freeze_encoder:
            model.freeze_encoder()
        num_repeats = encoder_recipe.masking.num_repeats
        runners[seed] = TaskRunner(model.to(device).eval(), tokenizer, num_repeats, best_recipe.train)
    return runners


def _recipe_of_best(run: Path, recipe: FinetuneRecipe, results: RunResults) -> FinetuneRecipe:
    """Return the recipe of the best grid point on one split, as its cells were trained with it."""
    label, split_seed = results.points[0], results.split_seeds[0]
    for point in grid_points(recipe, use_grid=results.grid_best is not None):
        if point.label == label:
            return point.recipe.changed({"task.split_seed": split_seed, "num_replicates": 1})
    raise CheckpointError(f"{run / RESULTS_FILE}: the grid of recipe.yaml has no point `{label}`", ALTERED_HINT)


def _best_weights(cell: Path) -> Path:
    best = next(iter(best_paths(cell)), None)
    reason = "its weights were deleted" if best is None else verify_checkpoint(best)
    if best is None or reason is not None:
        raise CheckpointError(f"{best or cell} is refused: {reason}", how_to_redo(cell))
    return best
