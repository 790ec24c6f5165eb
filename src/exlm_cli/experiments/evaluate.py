"""Scores of a pre-trained checkpoint: validation metrics, and entropy at any mask ratio and number of copies or states.

Entropy is that of App. E and Figures 5 and 12. The data are those of the checkpoint's run, or given files.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from exlm_cli.bundled_models import bundled_name
from exlm_cli.config.load import load_recipe
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.cost.meter import num_parameters
from exlm_cli.data.corpus.prepare import PreparedData, prepare_data
from exlm_cli.data.rows.records import SKIPPED_FILE
from exlm_cli.errors import ConfigError, DataError
from exlm_cli.experiments.results import PredictionEntropy
from exlm_cli.files import finite_or_none
from exlm_cli.format import describe_ratio, format_number_of
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.progress import Progress, SilentProgress
from exlm_cli.run_dir import read_run_json, run_directory
from exlm_cli.train.checkpoint import load_model_weights
from exlm_cli.train.pretrain_task import VALIDATE_AT_SEQUENCES, PretrainTask
from exlm_cli.train.pretrained import Pretrained, build_model, load_pretrained


@dataclass(frozen=True)
class PretrainedScore:
    """A pre-trained checkpoint and its validation metrics.

    Attributes:
        tokenizer: `Tokenizer.fingerprint`.
        metrics: Metrics by name (`train.evaluation.summarise`).
        validated_at: Rows of the validation at fixed numbers of masks, each with `at`.
    """

    name: str
    checkpoint: str
    objective: str
    step: int
    parameters: int
    tokens: int
    tokenizer: str
    data: str
    metrics: Mapping[str, float]
    validated_at: Sequence[Mapping[str, float]] = ()


def evaluate_pretrained(
    path: Path,
    name: str,
    *,
    valid: Sequence[str] = (),
    overrides: Sequence[str] = (),
    max_sequences: int | None = None,
    validate_at: Sequence[float] | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> PretrainedScore:
    """Score a checkpoint: loss, perplexity, mask accuracy, entropy and, with a DAG, its health.

    The masks are those of the run's own validation, so on its own data the metrics are those of its metrics.jsonl, but
    over all validation sequences.

    Args:
        path: Run directory or `checkpoints/step-N`.
        valid: Files, folders or globs of text or SMILES; empty: the run's own validation data.
        overrides: For `valid`, like `data.column=NAME`. With `data.num_spellings=2` another spelling of each molecule
            is scored too, also where the model has seen canonical SMILES alone.
        max_sequences: Sequences scored, at least 1, evenly spread; none: all.
        validate_at: Numbers of masks and mask ratios, as in `train.validate_at`, at which 512 sequences are scored too,
            or `max_sequences`; none: those of the run's recipe.

    Raises:
        CheckpointError: There is no whole checkpoint.
        ConfigError: An override that is not accepted.
        DataError: The validation data cannot be used.
    """
    progress = progress or SilentProgress()
    pretrained = load_pretrained(path, device=device, progress=progress)
    data = _load_data(pretrained, valid, overrides, progress)
    own = pretrained.recipe
    if validate_at is not None:
        own = _own_recipe(pretrained, [f"train.validate_at={list(validate_at)}"])
    recipe = own.model_copy(update={"train": own.train.model_copy(update={"validation_sequences": max_sequences})})
    num_scored = min(len(data.valid), max_sequences or len(data.valid))
    num_sequences = format_number_of(num_scored, "sequence")
    progress.message(f"scoring {name} on {num_sequences}")
    task = _task(recipe, data, pretrained.model)
    return PretrainedScore(
        name,
        pretrained.name,
        recipe.objective,
        pretrained.step,
        num_parameters(pretrained.model),
        pretrained.num_tokens,
        pretrained.tokenizer.fingerprint,
        f"{num_sequences} of {', '.join(valid) or 'its own validation data'}",
        task.validate(progress),
        task.validate_at(max_sequences or VALIDATE_AT_SEQUENCES, progress),
    )


def measure_entropy(
    path: Path,
    *,
    mask_ratios: Sequence[float | tuple[float, float]] = (),
    ks: Sequence[int] = (),
    valid: Sequence[str] = (),
    overrides: Sequence[str] = (),
    max_sequences: int | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> list[PredictionEntropy]:
    """Score a checkpoint at every pair of `ks` and `mask_ratios`, with the masks of its own seed.

    Args:
        path: Run directory or `checkpoints/step-N`.
        mask_ratios: Each one number or a range; empty: what it was trained with.
        ks: Copies of a token for Repeated MLM, states of a mask for ExLM; empty: as trained.
        valid: Validation inputs; empty: the run's own.
        overrides: For `valid`, like `data.column=NAME`.
        max_sequences: Sequences scored, at least 1, evenly spread; none: all.

    Raises:
        CheckpointError: No checkpoint there.
        ConfigError: A masking that the model cannot take: copies beyond its learned positions, or, of a chain, another
            number of states than it was trained with.
        DataError: Validation data that cannot be used.
    """
    progress = progress or SilentProgress()
    pretrained = load_pretrained(path, device=device, progress=progress)
    masking = pretrained.recipe.masking
    own_k = masking.num_states_per_mask if pretrained.recipe.objective == "exlm" else masking.num_repeats
    pairs = [(k, p) for k in ks or (own_k,) for p in mask_ratios or (masking.mask_ratio,)]
    recipes = [_with_masking(pretrained, k, p, max_sequences) for k, p in pairs]
    data = _load_data(pretrained, valid, overrides, progress)
    results = []
    with progress.bar("entropy", len(pairs)) as bar:
        for number, recipe in enumerate(recipes, start=1):
            metrics = finite_or_none(_task(recipe, data, _model_with_states(pretrained, recipe)).validate())
            results.append(
                PredictionEntropy(
                    objective=recipe.objective,
                    mask_ratio=recipe.masking.mask_ratio,
                    num_repeats=recipe.masking.num_repeats,
                    num_states_per_mask=recipe.masking.num_states_per_mask,
                    metrics=metrics,
                )
            )
            bar.update(number, k=str(pairs[number - 1][0]), p=describe_ratio(pairs[number - 1][1]))
    return results


def _load_data(
    pretrained: Pretrained, valid: Sequence[str], overrides: Sequence[str], progress: Progress
) -> PreparedData:
    """Return the run's own data, or all rows of given validation inputs, tokenised as in the run."""
    if not valid and bundled_name(pretrained.checkpoint):
        raise DataError(f"`{pretrained.name}` brings no validation data", "give some with `--data FILE`")
    # the tokenizer of the run: the file that it came from may have changed
    tokenizer = run_directory(pretrained.checkpoint) / "tokenizer.json"
    own = [f"tokenizer.path={json.dumps(str(tokenizer), ensure_ascii=False)}"]
    if valid:
        inputs = json.dumps(list(valid), ensure_ascii=False)
        own += [f"data.valid={inputs}", "data.max_rows=null", *overrides]
    data = prepare_data(_own_recipe(pretrained, own), progress=progress, is_trained=not valid)
    if valid and data.num_rejected:
        listed = data.valid.directory.parent / SKIPPED_FILE
        progress.message(f"skipped {format_number_of(data.num_rejected, 'row')}, listed in {listed}")
    trained_on = read_run_json(run_directory(pretrained.checkpoint)).data_fingerprint
    if not valid and data.fingerprint != trained_on:
        progress.message(
            f"{pretrained.checkpoint}: its data have changed since it was trained; the scores are on the changed data"
        )
    return data


def _own_recipe(pretrained: Pretrained, overrides: Sequence[str]) -> PretrainRecipe:
    return load_recipe(run_directory(pretrained.checkpoint) / "recipe.yaml", overrides)


def _with_masking(
    pretrained: Pretrained, k: int, ratio: float | tuple[float, float], max_sequences: int | None
) -> PretrainRecipe:
    """Return the run's recipe with another p and k, and room for what they expand to."""
    own = pretrained.recipe
    key = "num_states_per_mask" if own.objective == "exlm" else "num_repeats"
    max_length = own.data.sequence_length * k
    wanted = [
        f"masking.mask_ratio={list(ratio) if isinstance(ratio, tuple) else ratio}",
        f"masking.{key}={k}",
        f"train.microbatch_tokens={max(own.train.microbatch_tokens, max_length)}",
        f"train.validation_sequences={'null' if max_sequences is None else max_sequences}",
        f"device={own.device}",
    ]
    if not own.model.learned_positions:
        wanted.append(f"model.max_length={max(own.model.max_length, max_length)}")
    return _own_recipe(pretrained, wanted)


def _task(recipe: PretrainRecipe, data: PreparedData, model: ExlmModel) -> PretrainTask:
    return PretrainTask(recipe, data, model, next(model.parameters()).device)


def _model_with_states(pretrained: Pretrained, recipe: PretrainRecipe) -> ExlmModel:
    """Return the network with the recipe's number of states; no weight depends on it if masks expand in the input."""
    k = recipe.masking.num_states_per_mask
    if k == pretrained.model.num_states_per_mask:
        return pretrained.model
    if not pretrained.model.expands_input:
        raise ConfigError(
            f"{pretrained.checkpoint}: cannot be scored with {k} states per mask: it was trained with "
            f"{pretrained.model.num_states_per_mask} and `model.alignment: chain`, with weights of each",
            "leave the number of states out: it is then scored with its own",
        )
    device = next(pretrained.model.parameters()).device
    model = build_model(recipe, pretrained.tokenizer, device)
    load_model_weights(pretrained.checkpoint, model)
    return model
