"""Entropy of a checkpoint's predictions at any mask ratio and number of copies or states (App. E; Figures 5 and 12)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from exlm_cli.config.load import load_recipe
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.data.corpus.pipeline import PreparedData, prepare_data
from exlm_cli.errors import ConfigError
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.progress import Progress, SilentProgress
from exlm_cli.run_dir import read_run_json, run_directory
from exlm_cli.train.checkpoint import load_model_weights
from exlm_cli.train.pretrain import PretrainTask
from exlm_cli.train.pretrained import Pretrained, build_model, load_pretrained


@dataclass(frozen=True)
class PredictionEntropy:
    """Figures of one checkpoint under one masking of the validation data.

    Attributes:
        objective: `mlm` or `exlm`.
        mask_ratio: p of the masking.
        num_repeats: k of Repeated MLM; 1 otherwise.
        num_states_per_mask: k of ExLM; 1 otherwise.
        entropy_bits: Mean entropy of the emitted distributions. For (Repeated) MLM that is App. E: only tokens whose
            copies are all masked, mean over copies, then over tokens; NaN where there is none. For ExLM it is the mean
            over expanded states.
        entropy_posterior_bits: For ExLM with a DAG, every state weighted by the posterior that it emits a target, mean
            over targets; None otherwise.
        metrics: All figures of the validation, see `train.evaluation.summarise`.
    """

    objective: str
    mask_ratio: float
    num_repeats: int
    num_states_per_mask: int
    entropy_bits: float
    entropy_posterior_bits: float | None
    metrics: dict[str, float]


def measure_entropy(
    path: Path,
    *,
    mask_ratios: Sequence[float] = (),
    ks: Sequence[int] = (),
    valid: Sequence[str] = (),
    max_sequences: int | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> list[PredictionEntropy]:
    """Score a checkpoint at every pair of `ks` and `mask_ratios`, with the masks of its own seed.

    Args:
        path: Run directory or `checkpoints/step-N`.
        mask_ratios: Empty: the one it was trained with.
        ks: Copies of a token for Repeated MLM, states of a mask for ExLM; empty: as trained.
        valid: Validation inputs; empty: the run's own.
        max_sequences: Sequences scored, evenly spread; none: all.
        device: Where the model runs.
        progress: Messages and bars.

    Raises:
        CheckpointError: No checkpoint there.
        ConfigError: A masking that the model cannot take: copies beyond its learned positions, or other states than its
            clone embeddings are for.
        DataError: Validation data that cannot be used.
    """
    progress = progress or SilentProgress()
    pretrained = load_pretrained(path, device=device, progress=progress)
    masking = pretrained.recipe.masking
    own_k = masking.num_states_per_mask if pretrained.recipe.objective == "exlm" else masking.num_repeats
    pairs = [(k, p) for k in ks or (own_k,) for p in mask_ratios or (masking.mask_ratio,)]
    recipes = [_with_masking(pretrained, k, p, max_sequences) for k, p in pairs]
    data = load_validation_data(pretrained, valid, progress)
    results = []
    with progress.bar("entropy", len(pairs)) as bar:
        for number, recipe in enumerate(recipes, start=1):
            results.append(_score(pretrained, recipe, data))
            bar.update(number, k=str(pairs[number - 1][0]), p=f"{pairs[number - 1][1]:g}")
    return results


def load_validation_data(pretrained: Pretrained, valid: Sequence[str], progress: Progress) -> PreparedData:
    """Return the run's own data, or all rows of given validation inputs, tokenised as in the run.

    A message says where the run's own data are no longer those that it was trained on.

    Raises:
        DataError: The inputs are missing or unusable.
    """
    # the tokenizer of the run: the file that it came from may have changed
    tokenizer = run_directory(pretrained.checkpoint) / "tokenizer.json"
    own = [f"tokenizer.path={json.dumps(str(tokenizer), ensure_ascii=False)}"]
    if valid:
        # a recipe needs training data too; nothing is trained, so the validation inputs do for both
        inputs = json.dumps(list(valid), ensure_ascii=False)
        own += [f"data.train={inputs}", f"data.valid={inputs}", "data.max_rows=null"]
    data = prepare_data(_own_recipe(pretrained, own), rejected_csv=None, progress=progress)
    trained_on = read_run_json(run_directory(pretrained.checkpoint)).data_fingerprint
    if not valid and data.fingerprint != trained_on:
        progress.message(
            f"{pretrained.checkpoint}: its data have changed since it was trained; the scores are on the changed data"
        )
    return data


def _own_recipe(pretrained: Pretrained, overrides: Sequence[str]) -> PretrainRecipe:
    return load_recipe(str(run_directory(pretrained.checkpoint) / "recipe.yaml"), overrides)


def _with_masking(pretrained: Pretrained, k: int, ratio: float, max_sequences: int | None) -> PretrainRecipe:
    """Return the run's recipe with another p and k, and room for what they expand to."""
    own = pretrained.recipe
    key = "num_states_per_mask" if own.objective == "exlm" else "num_repeats"
    max_length = own.data.sequence_length * k
    wanted = [
        f"masking.mask_ratio={ratio}",
        f"masking.{key}={k}",
        f"train.microbatch_tokens={max(own.train.microbatch_tokens, max_length)}",
        f"train.validation_sequences={'null' if max_sequences is None else max_sequences}",
        f"device={own.device}",
    ]
    if not own.model.learned_positions:
        wanted.append(f"model.max_length={max(own.model.max_length, max_length)}")
    return _own_recipe(pretrained, wanted)


def _score(pretrained: Pretrained, recipe: PretrainRecipe, data: PreparedData) -> PredictionEntropy:
    model = _model_with_states(pretrained, recipe)
    device = next(model.parameters()).device
    metrics = PretrainTask(recipe, data, model, device).validate()
    return PredictionEntropy(
        recipe.objective,
        recipe.masking.mask_ratio,
        recipe.masking.num_repeats,
        recipe.masking.num_states_per_mask,
        metrics["entropy_bits"],
        metrics.get("entropy_posterior_bits"),
        metrics,
    )


def _model_with_states(pretrained: Pretrained, recipe: PretrainRecipe) -> ExlmModel:
    """Return the network with the recipe's number of states; of its weights only clone embeddings depend on that."""
    k = recipe.masking.num_states_per_mask
    if k == pretrained.model.num_states_per_mask:
        return pretrained.model
    if pretrained.model.clone_embedding is not None:
        raise ConfigError(
            f"{pretrained.checkpoint}: trained with {pretrained.model.num_states_per_mask} states per mask and "
            f"`model.clone_embedding: {recipe.model.clone_embedding}`, it cannot be scored with {k}",
            "leave the number of states out: it is then scored with its own",
        )
    device = next(pretrained.model.parameters()).device
    model = build_model(recipe, pretrained.tokenizer, device)
    load_model_weights(pretrained.checkpoint, model)
    return model
