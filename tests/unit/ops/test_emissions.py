"""Chunked emissions against log_softmax + gather, values and every gradient, in float64 and under autocast."""

import pytest
import torch

from exlm_cli.ops import emissions
from exlm_cli.ops.emissions import token_log_probs, token_statistics

ROWS, WIDTH, VOCAB, TOKENS = 13, 6, 29, 4


def _inputs(dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=dtype, requires_grad=True)
    bias = torch.randn(VOCAB, generator=generator, dtype=dtype, requires_grad=True)
    tokens = torch.randint(0, VOCAB, (ROWS, TOKENS), generator=generator)
    tokens[0] = 7  # one row asks for the same token throughout
    return hidden, weight, bias, tokens


def _reference(hidden, weight, bias, tokens):
    return (hidden @ weight.t() + bias).log_softmax(-1).gather(1, tokens)


@pytest.mark.parametrize(("chunk_rows", "block_rows"), [(1, WIDTH), (5, 100), (12, WIDTH), (ROWS, 100), (100, WIDTH)])
def test_values_and_gradients_are_those_of_log_softmax(chunk_rows, block_rows, monkeypatch):
    """Rows that are kept, made again, and both (12 rows in blocks of 6: one block is kept)."""
    monkeypatch.setattr(emissions, "_CPU_BLOCK_ELEMENTS", block_rows * VOCAB)
    *leaves, tokens = _inputs()
    upstream = torch.randn(ROWS, TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    given = token_log_probs(*leaves, tokens, chunk_rows=chunk_rows)
    expected = _reference(*leaves, tokens)
    torch.testing.assert_close(given, expected)
    mine, theirs = (torch.autograd.grad((result * upstream).sum(), leaves) for result in (given, expected))
    torch.testing.assert_close(mine, theirs)


def test_the_operator_keeps_its_promises_and_stays_whole_when_compiled():
    *leaves, tokens = _inputs()
    for chunk_rows, num_kept in ((5, 0), (100, ROWS)):
        arguments = (*leaves, tokens, chunk_rows, torch.float64, num_kept)
        # the log-sum-exp of a row is written on a device alone, so runs are compared by their gradients below
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        assert set(
            torch.library.opcheck(torch.ops.exlm.token_log_probs.default, arguments, test_utils=checks).values()
        ) == {"SUCCESS"}
        compiled = torch.compile(token_log_probs, fullgraph=True, backend="aot_eager")
        results = [score(*leaves, tokens, chunk_rows=chunk_rows) for score in (token_log_probs, compiled)]
        mine, theirs = (torch.autograd.grad(result.sum(), leaves) for result in results)
        assert all(torch.equal(a, b) for a, b in zip((results[0], *mine), (results[1], *theirs), strict=True))


def test_no_rows_give_no_probabilities_and_zero_gradients():
    hidden, weight, bias, tokens = _inputs()
    result = token_log_probs(hidden[:0], weight, bias, tokens[:0], chunk_rows=4)
    assert result.shape == (0, TOKENS)
    assert torch.autograd.grad(result.sum(), weight)[0].eq(0).all()
    assert len(token_statistics(hidden[:0], weight, bias, chunk_rows=4).best_token) == 0


def test_under_autocast_the_error_is_that_of_the_product_in_that_precision():
    hidden, weight, bias, tokens = _inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        given = token_log_probs(hidden, weight, bias, tokens, chunk_rows=4)
    assert given.dtype == torch.float32
    exact = _reference(hidden, weight, bias, tokens)
    in_bf16 = _reference(hidden.bfloat16(), weight.bfloat16(), bias.bfloat16(), tokens).float()
    assert (given - exact).abs().max() <= 2 * (in_bf16 - exact).abs().max()
    given.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("chunk_rows", "block_rows", "kept_rows"),
    [(4, 100, []), (9, 6, []), (12, 6, [6]), (12, 1, [6]), (ROWS, 100, [ROWS]), (ROWS, 7, [ROWS])],
)
def test_what_is_kept_and_the_block_at_work_are_at_most_a_chunk(chunk_rows, block_rows, kept_rows, monkeypatch):
    """A block has WIDTH = 6 rows at least, the last one what is left; where all rows are a chunk, all are kept."""
    monkeypatch.setattr(emissions, "_CPU_BLOCK_ELEMENTS", block_rows * VOCAB)
    *leaves, tokens = _inputs()
    saved: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        token_log_probs(*leaves, tokens, chunk_rows=chunk_rows)
    assert [shape[0] for shape in saved if shape[0] and shape[1:] == (VOCAB,)] == kept_rows


def test_statistics_are_those_of_the_distributions():
    hidden, weight, bias, _ = _inputs()
    log_probs = (hidden @ weight.t() + bias).log_softmax(-1).detach().float()
    statistics = token_statistics(hidden, weight, bias, chunk_rows=5)
    torch.testing.assert_close(statistics.entropy_nats, torch.distributions.Categorical(logits=log_probs).entropy())
    torch.testing.assert_close(statistics.best_token, log_probs.argmax(-1))
    torch.testing.assert_close(statistics.best_log_prob, log_probs.amax(-1))


def test_statistics_under_autocast_are_those_of_float32_logits():
    """In bfloat16 the logits 100 and 100.1 are equal, and the entropy is ln 2 = 0.6931."""
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[100.0], [100.1]])
    with torch.autocast("cpu", torch.bfloat16):
        statistics = token_statistics(hidden, weight, torch.zeros(2), chunk_rows=1)
    exact = torch.distributions.Categorical(logits=torch.tensor([100.0, 100.1])).entropy()
    torch.testing.assert_close(statistics.entropy_nats, exact[None])
    assert statistics.best_token.tolist() == [1]


def test_a_certain_distribution_has_entropy_zero_not_nan():
    hidden = torch.tensor([[1000.0]])
    weight = torch.tensor([[1.0], [0.0], [-1.0]])
    statistics = token_statistics(hidden, weight, torch.zeros(3), chunk_rows=1)
    assert statistics.entropy_nats.tolist() == [0.0]
