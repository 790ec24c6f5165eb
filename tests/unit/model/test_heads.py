"""The network of a task: the checkpoint's encoder bit by bit, heads by hand, repetition undone, padding invisible."""

import pytest
import torch
from torch import nn

from exlm_cli.config.finetune import FinetuneModelConfig
from exlm_cli.data.batch import expand
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.model.heads import SequenceHead, SpanHead, TaskModel
from tests.tiny import CHAIN, SPECIAL, masked_by_hand, tiny_recipe

V = SPECIAL.vocab_size
NO_DROPOUT = FinetuneModelConfig(dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, pooler_dropout=0.0)


def task_model(recipe, num_outputs=3, pooled="cls"):
    torch.manual_seed(1)
    return TaskModel(recipe, NO_DROPOUT, V, num_outputs, pooled=pooled).eval()


def padded(*sequences):
    longest = max(map(len, sequences))
    rows = [s + [SPECIAL.pad_id] * (longest - len(s)) for s in sequences]
    return torch.tensor(rows), torch.tensor([len(s) for s in sequences])


A, B = [1, 7, 8, 9, 10, 2], [1, 11, 12, 2]


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"model": CHAIN},
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
    head = SequenceHead(4, 4, 2, 0.3).eval()
    hidden = torch.randn(2, 5, 4)
    by_hand = torch.tanh(hidden[:, 0] @ head.dense.weight.T + head.dense.bias) @ head.out.weight.T + head.out.bias
    torch.testing.assert_close(head(hidden, torch.tensor([5, 3])), by_hand)


def test_a_row_is_the_mean_of_its_states_and_a_pair_both_means_compared():
    """By hand, each row alone and without padding; texts of a pair are read as if each were a row."""
    model = task_model(tiny_recipe(), pooled="mean")
    token_ids, lengths = padded(A, B)
    with torch.no_grad():
        states = [model.encode(torch.tensor([row]), torch.tensor([len(row)]))[0] for row in (A, B)]
        first, second = (state.mean(0) for state in states)
        torch.testing.assert_close(model.encode_row(token_ids, lengths), torch.stack([first, second]))
        paired = task_model(tiny_recipe(), pooled="means")
        paired.encoder.load_state_dict(model.encoder.state_dict())
        found = paired.encode_row(token_ids, lengths)[0]
    first, second = (state / state.square().mean().sqrt() for state in (first, second))
    torch.testing.assert_close(found, torch.cat([first, second, (first - second).abs(), first * second]))
    cosine = torch.cosine_similarity(first, second, dim=0)
    torch.testing.assert_close(found[-len(first) :].mean(), cosine)


@pytest.mark.parametrize("num_outputs", [1, None])
def test_scores_are_not_rounded_to_16_bits(num_outputs):
    model = task_model(tiny_recipe(), num_outputs)
    token_ids, lengths = padded(A, B)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        states, scores = model.encode(token_ids, lengths), model(token_ids, lengths)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, model.head(states.float(), lengths), rtol=0, atol=0)
    assert not torch.equal(scores, scores.bfloat16().float())


@pytest.mark.parametrize("num_outputs", [3, None])
def test_a_task_model_has_the_dropout_of_fine_tuning(num_outputs):
    rates = FinetuneModelConfig(dropout=0.4, attention_dropout=0.3, activation_dropout=0.2, pooler_dropout=0.1)
    model = TaskModel(tiny_recipe(), rates, V, num_outputs)
    of_encoder, of_head = (
        {part.p for part in side.modules() if isinstance(part, nn.Dropout)} for side in (model.encoder, model.head)
    )
    assert (of_encoder, of_head) == ({0.4, 0.2}, {0.1})
    assert {block.attention_dropout for block in model.encoder.blocks} == {0.3}


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
