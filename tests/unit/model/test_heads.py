"""The network of a task: the checkpoint's encoder bit by bit, heads by hand, repetition undone, padding invisible."""

import pytest
import torch
from torch import Tensor, nn

from exlm_cli.config.finetune import FinetuneModelConfig
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.data.batch import expand
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.model.heads import SequenceHead, SpanHead, TaskModel, with_dropout
from tests.tiny import OUTPUT, SPECIAL, masked_by_hand, tiny_recipe

V = SPECIAL.vocab_size
NO_DROPOUT = FinetuneModelConfig(dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, pooler_dropout=0.0)


def task_model(recipe: PretrainRecipe, num_outputs: int | None = 3) -> TaskModel:
    torch.manual_seed(1)
    return TaskModel(recipe, NO_DROPOUT, V, num_outputs).eval()


def padded(*sequences: list[int]) -> tuple[Tensor, Tensor]:
    longest = max(map(len, sequences))
    rows = [s + [SPECIAL.pad_id] * (longest - len(s)) for s in sequences]
    return torch.tensor(rows), torch.tensor([len(s) for s in sequences])


A, B = [1, 7, 8, 9, 10, 2], [1, 11, 12, 2]


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"model": OUTPUT},
        {"objective": "mlm", "model": {"rope": "1d"}},
        {"objective": "mlm", "model": {"rope": "none", "learned_positions": True}},
    ],
)
def test_the_encoder_gives_the_states_of_the_pretrained_model_on_inputs_without_masks(sections):
    recipe = tiny_recipe(**sections, name="x")
    torch.manual_seed(0)
    pretrained = ExlmModel(recipe, V).eval()
    model = task_model(recipe)
    model.load_encoder(pretrained)
    token_ids, lengths = padded(A, B)
    batch = expand(masked_by_hand([A, B], []), 1, expands_input=recipe.expands_input, pad_id=SPECIAL.pad_id)
    mine, theirs = model.encode(token_ids, lengths), pretrained.encode(batch)
    for row, length in enumerate(lengths.tolist()):  # padding may differ
        assert torch.equal(mine[row, :length], theirs[row, :length])


def test_nothing_but_the_encoder_of_a_checkpoint_is_taken():
    recipe = tiny_recipe(model=OUTPUT)
    names = set(task_model(recipe).state_dict())
    assert {name.partition(".")[0] for name in names} == {"encoder", "head", "output_mean", "output_std"}
    model = task_model(recipe)
    before = model.head.out.weight.clone()
    model.load_encoder(ExlmModel(recipe, V))
    assert torch.equal(model.head.out.weight, before)


@pytest.mark.parametrize("num_outputs", [3, None])
def test_padding_changes_nothing(num_outputs):
    model = task_model(tiny_recipe(), num_outputs)
    both = model(*padded(A, B))
    alone = model(*padded(B))
    if num_outputs is None:
        both = both[:, : len(B)]
    torch.testing.assert_close(both[1], alone[0])


def test_the_sequence_head_is_dense_tanh_out_on_cls():
    torch.manual_seed(0)
    head = SequenceHead(4, 2, 0.3).eval()
    hidden = torch.randn(2, 5, 4)
    by_hand = torch.tanh(hidden[:, 0] @ head.dense.weight.T + head.dense.bias) @ head.out.weight.T + head.out.bias
    torch.testing.assert_close(head(hidden, torch.tensor([5, 3])), by_hand)


@pytest.mark.parametrize("num_outputs", [1, None])
def test_scores_are_not_rounded_to_16_bits(num_outputs):
    model = task_model(tiny_recipe(), num_outputs)
    token_ids, lengths = padded(A, B)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        states, scores = model.encode(token_ids, lengths), model(token_ids, lengths)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, model.head(states.float(), lengths), rtol=0, atol=0)
    assert not torch.equal(scores, scores.bfloat16().float())


def test_pooler_dropout_falls_before_both_layers():
    head = SequenceHead(1000, 1, 0.5).train()
    dropped: list[float] = []
    for layer in (head.dense, head.out):
        layer.register_forward_pre_hook(lambda _, args: dropped.append(float((args[0] == 0).float().mean())))
    torch.manual_seed(0)
    head(torch.ones(4, 2, 1000), torch.tensor([2] * 4))
    # 4,000 draws of one half: five standard errors are 0.04
    assert dropped == pytest.approx([0.5, 0.5], abs=0.04)


def test_dropout_of_spans_falls_before_their_only_layer():
    head = SpanHead(1000, 0.5, 1).train()
    dropped: list[float] = []
    head.out.register_forward_pre_hook(lambda _, args: dropped.append(float((args[0] == 0).float().mean())))
    torch.manual_seed(0)
    head(torch.ones(2, 2, 1000), torch.tensor([2] * 2))
    assert dropped == pytest.approx([0.5], abs=0.04)


@pytest.mark.parametrize("num_outputs", [3, None])
def test_a_task_model_has_the_dropout_of_fine_tuning(num_outputs):
    rates = FinetuneModelConfig(dropout=0.4, attention_dropout=0.3, activation_dropout=0.2, pooler_dropout=0.1)
    model = TaskModel(tiny_recipe(), rates, V, num_outputs)
    of_encoder, of_head = (
        {part.p for part in side.modules() if isinstance(part, nn.Dropout)} for side in (model.encoder, model.head)
    )
    assert (of_encoder, of_head) == ({0.4, 0.2}, {0.1})
    assert {block.attention_dropout for block in model.encoder.blocks} == {0.3}


def test_a_head_starts_as_bert_does():
    model = TaskModel(tiny_recipe(model={"width": 64}), NO_DROPOUT, V, 1)
    weights = model.head.dense.weight.detach()
    # the standard deviation of n normal numbers is known to 1 / sqrt(2 n) of itself
    assert float(weights.std()) == pytest.approx(0.02, abs=5 * 0.02 / (2 * weights.numel()) ** 0.5)
    assert model.head.dense.bias.eq(0).all()


@pytest.mark.parametrize("num_repeats", [1, 2, 3])
def test_span_logits_of_copies_are_averaged_back_to_tokens(num_repeats):
    torch.manual_seed(0)
    head = SpanHead(4, 0.0, num_repeats)
    num_inner = (3, 1)
    lengths = torch.tensor([n * num_repeats + 2 for n in num_inner])
    hidden = torch.randn(2, int(lengths.max()), 4)
    logits = head.out(hidden)
    folded = head(hidden, lengths)
    for row, n in enumerate(num_inner):
        first = [0, *(1 + j * num_repeats for j in range(n + 1))]
        copies = [1, *[num_repeats] * n, 1]
        by_hand = torch.stack([logits[row, f : f + c].mean(0) for f, c in zip(first, copies, strict=True)])
        torch.testing.assert_close(folded[row, : n + 2], by_hand)


def test_regression_is_predicted_in_the_units_of_the_task():
    model = task_model(tiny_recipe(), 2)
    model.output_mean.copy_(torch.tensor([1.0, 10.0]))
    model.output_std.copy_(torch.tensor([2.0, 0.5]))
    batch = padded(A, B)
    outputs = model(*batch)
    expected = outputs.double() * torch.tensor([2.0, 0.5]) + torch.tensor([1.0, 10.0])
    torch.testing.assert_close(model.in_units(outputs), expected)
    spans = task_model(tiny_recipe(), None)
    assert torch.equal(spans.in_units(spans(*batch)), spans(*batch).double())


def test_dropout_of_the_recipe_wins_over_the_checkpoints_and_none_keeps_it():
    pretrained = tiny_recipe(model={"dropout": 0.3, "attention_dropout": 0.2}).model
    merged = with_dropout(pretrained, FinetuneModelConfig(dropout=0.0, pooler_dropout=0.5))
    assert (merged.dropout, merged.attention_dropout) == (0.0, 0.2)
    assert merged.width == pretrained.width
