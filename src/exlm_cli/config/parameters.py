"""How large a recipe's model and step are, in closed form; no torch."""

from exlm_cli.config.pretrain import PretrainRecipe


def count_parameters(recipe: PretrainRecipe, vocab_size: int | None = None) -> int:
    """Return the number of trained parameters, tied ones counted once.

    Args:
        recipe: Its `model`, `masking` and `objective` decide the architecture.
        vocab_size: V of the tokenizer in use; none: the recipe's `tokenizer.vocab_size`.
    """
    model = recipe.model
    width, ffn_width = model.width, model.ffn_width
    vocab = recipe.tokenizer.vocab_size if vocab_size is None else vocab_size
    norm = 2 * width
    attention = 4 * _linear(width, width)
    block = norm + attention + norm + _linear(width, ffn_width) + _linear(ffn_width, width)
    embeddings = vocab * width
    if model.learned_positions:
        embeddings += model.max_length * width
    if model.clone_embedding != "none":
        embeddings += recipe.masking.num_states_per_mask * width
    lm_head = _linear(width, width) + norm + vocab
    return embeddings + model.num_layers * block + norm + lm_head + _transition_parameters(recipe)


def tokens_per_step(recipe: PretrainRecipe) -> int:
    """Return the most input tokens of an optimiser step: repetitions counted, expansion not."""
    train = recipe.train
    if train.batch_tokens is not None:
        return train.batch_tokens
    assert train.batch_sequences is not None, "a recipe has one of the two"
    return train.batch_sequences * recipe.repeated_length


def _transition_parameters(recipe: PretrainRecipe) -> int:
    model = recipe.model
    if recipe.objective == "mlm" or model.alignment == "independent":
        return 0
    transition = model.transition
    positions = transition.max_nodes * model.width if transition.position_features else 0
    feature_width = model.width * (2 if transition.position_features else 1)
    gate = _linear(feature_width, transition.heads) if transition.heads > 1 else 0
    lanes = 2 if transition.lane_bias else 0
    return positions + 2 * _linear(feature_width, model.width) + gate + lanes


def _linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs
