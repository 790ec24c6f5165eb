"""The LM head against log_softmax + gather: on a CPU, and as on CUDA, by blocks in torch or by simulated kernels."""

import pytest
import torch

from exlm_cli.ops import emissions, head_kernels
from exlm_cli.ops.emissions import token_log_probs, token_statistics
from exlm_cli.ops.head_kernels import LogitRows
from tests.unit.ops.simulation import ORDERS, simulator

WIDTH = 6
CASES = [
    ((13, 29, 4), 1, torch.float32), ((13, 29, 4), 3, torch.bfloat16), ((13, 29, 4), 12, torch.float32),
    ((3, 5003, 2), 1, torch.bfloat16), ((3, 5003, 2), 100, torch.float16), ((2, 64, 300), 100, torch.float32),
    ((1, 1, 1), 3, torch.float16),
]  # fmt: skip
"""Rows, vocabulary and tokens (part of a pack; several packs a thread; more tokens than threads; the least), rows of a
chunk, and the dtype of products."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _inputs(num_rows, vocab_size, num_tokens):
    generator = torch.Generator().manual_seed(0)
    shapes = ((num_rows, WIDTH), (vocab_size, WIDTH), (vocab_size,))
    leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    tokens = torch.randint(0, vocab_size, (num_rows, num_tokens), generator=generator)
    tokens[: num_rows // 2] = vocab_size // 3  # these rows ask for the same token throughout
    return leaves, tokens


def _reference(leaves, tokens, dtype):
    hidden, weight, bias = leaves
    logits = (hidden.to(dtype) @ weight.to(dtype).t()).double() + bias.double()
    return logits.log_softmax(-1).gather(1, tokens)


@pytest.fixture(params=["cpu", "torch", "kernels"])
def place(request, simulated, monkeypatch):
    """On a CPU, in blocks of `WIDTH` rows; or every tensor is taken for one on a device, and by what it is computed."""
    monkeypatch.setattr(emissions, "_CPU_BLOCK_ELEMENTS", 1)
    if request.param != "cpu":
        monkeypatch.setattr(emissions, "_is_on_device", lambda tensor: True)
        monkeypatch.setattr(emissions, "_free_bytes", lambda device: 1 << 30)
        monkeypatch.setattr(emissions, "_has_kernels", lambda logits: request.param == "kernels")
        monkeypatch.setattr(emissions, "device_kernels", lambda device: simulated.on(0, 0))
    return str(request.param)


def _score(leaves, tokens, chunk_rows, dtype=torch.bfloat16):
    """Return the result, and how many rows of the padded vocabulary were kept for the backward pass."""
    saved = []
    with (
        torch.autocast("cpu", dtype, enabled=dtype.itemsize == 2),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t),
    ):
        result = token_log_probs(*leaves, tokens, chunk_rows=chunk_rows)
    return result, [shape[0] for shape in saved if shape[0] and shape[1:] in ((64,), (29,))]


@pytest.mark.parametrize(("size", "chunk_rows", "dtype"), CASES, ids=str)
def test_values_and_gradients_are_those_of_log_softmax(size, chunk_rows, dtype, place):
    leaves, tokens = _inputs(*size)
    upstream = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(1))
    given, _ = _score(leaves, tokens, chunk_rows, dtype)
    expected = _reference(leaves, tokens, dtype)
    assert given.dtype == torch.float32
    torch.testing.assert_close(given.double(), expected, rtol=1e-6, atol=2e-6)
    mine = torch.autograd.grad((given * upstream).sum(), leaves, retain_graph=True)
    theirs = torch.autograd.grad((expected * upstream).sum(), leaves)
    # gradients of logits and products have the precision of the dtype
    precision = 4 * torch.finfo(dtype).eps
    for gradient, wanted in zip(mine, theirs, strict=True):
        assert (gradient - wanted).norm() <= precision * wanted.norm() + 1e-6
    # what is kept is not overwritten
    again = torch.autograd.grad((given * upstream).sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(mine, again, strict=True))


@pytest.mark.parametrize("place", ["cpu", "torch"], indirect=True)
@pytest.mark.parametrize("chunk_rows", [1, 12, 100])
def test_float64_is_not_rounded(chunk_rows, place):
    """The kernels have no float64."""
    leaves, tokens = _inputs(13, 29, 4)
    leaves = [leaf.detach().double().div(3).requires_grad_() for leaf in leaves]
    given, _ = _score(leaves, tokens, chunk_rows, torch.float64)
    expected = _reference(leaves, tokens, torch.float64)
    mine, theirs = (torch.autograd.grad(result.square().sum(), leaves) for result in (given, expected))
    torch.testing.assert_close((given, *mine), (expected, *theirs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("place", ["torch", "kernels"], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_have_the_same_bits_whatever_memory_is_free(dtype, place, monkeypatch):
    """Of 13 rows in blocks of 3 all are kept, whole blocks that leave room for one at work, or none."""
    leaves, tokens = _inputs(13, 29, 4)
    upstream = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(1))
    row_bytes, results = 64 * dtype.itemsize, []
    for free_rows, kept_rows in ((13, [13]), (12, [9]), (8, [3]), (5, []), (0, [])):
        free = round(free_rows * row_bytes / emissions._KEPT_SHARE)
        monkeypatch.setattr(emissions, "_free_bytes", lambda device, free=free: free)
        given, kept = _score(leaves, tokens, 3, dtype)
        assert kept == kept_rows
        results.append([given, *torch.autograd.grad((given * upstream).sum(), leaves)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(
    ("chunk_rows", "block_rows", "kept_rows"),
    [(4, 100, []), (9, 6, []), (12, 6, [6]), (12, 1, [6]), (13, 100, [13]), (13, 7, [13])],
)
def test_on_a_cpu_what_is_kept_and_the_block_at_work_are_at_most_a_chunk(
    chunk_rows, block_rows, kept_rows, monkeypatch
):
    """A block has WIDTH = 6 rows at least, the last one what is left; where all rows are a chunk, all are kept."""
    monkeypatch.setattr(emissions, "_CPU_BLOCK_ELEMENTS", block_rows * 29)
    assert _score(*_inputs(13, 29, 4), chunk_rows)[1] == kept_rows


def test_no_rows_give_no_probabilities_and_zero_gradients(place):
    leaves, tokens = _inputs(0, 29, 4)
    result, _ = _score(leaves, tokens, 4)
    assert result.shape == (0, 4)
    assert torch.autograd.grad(result.sum(), leaves[1])[0].eq(0).all()
    assert len(token_statistics(*leaves, chunk_rows=4).best_token) == 0


def test_the_operator_keeps_its_promises(place):
    leaves, tokens = _inputs(7, 29, 4)
    # the log-sum-exp of a row is written on a device alone, so runs are compared by their gradients above
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for chunk_rows, num_kept in ((1, 2), (100, 7)):
        arguments = (*leaves, tokens, chunk_rows, torch.bfloat16, num_kept)
        outcome = torch.library.opcheck(torch.ops.exlm.token_log_probs.default, arguments, test_utils=checks)
        assert set(outcome.values()) == {"SUCCESS"}


@pytest.mark.parametrize("chunk_rows", [5, 100])
def test_the_operator_stays_whole_when_compiled(chunk_rows):
    leaves, tokens = _inputs(13, 29, 4)
    compiled = torch.compile(token_log_probs, fullgraph=True, backend="aot_eager")
    results = [score(*leaves, tokens, chunk_rows=chunk_rows) for score in (token_log_probs, compiled)]
    mine, theirs = (torch.autograd.grad(result.sum(), leaves) for result in results)
    assert all(torch.equal(a, b) for a, b in zip((results[0], *mine), (results[1], *theirs), strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_write_every_entry_and_do_not_depend_on_the_order_of_threads(dtype, simulated):
    """Padding holds NaN and is not read; its gradient is 0. A NaN among the logits spreads over its row alone."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(4, 5056, generator=generator) * 5).to(dtype)
    logits[:, 5003:] = torch.nan
    logits[3, 17] = torch.nan
    of_rows = LogitRows(logits, torch.randn(5003, generator=generator), torch.randint(0, 5003, (4, 9)))
    grad = torch.randn(4, 9, generator=generator)
    results = []
    for order in ORDERS:
        simulator(simulated).simt_set_order(order)
        log_sums, log_probs = torch.full((4,), torch.nan), torch.full((4, 9), torch.nan)
        gradient = torch.full_like(logits, torch.nan)
        kernels = simulated.on(0, 0)
        head_kernels.token_log_probs(kernels, of_rows, log_sums, log_probs)
        head_kernels.logit_gradient(kernels, of_rows, log_sums, log_probs, grad, gradient)
        results.append((log_sums, log_probs, gradient))
    log_sums, log_probs, gradient = results[0]
    wide = logits[:, :5003].double() + of_rows.bias.double()
    torch.testing.assert_close(log_sums.double(), wide.logsumexp(1), rtol=1e-6, atol=1e-6, equal_nan=True)
    assert gradient[:3].isfinite().all()
    assert gradient[:3, 5003:].eq(0).all()
    assert log_probs[3].isnan().all()
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a[:3], b[:3])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk_rows", [20, 1000])
def test_on_a_device_as_in_float64(chunk_rows, dtype):
    leaves, tokens = _inputs(300, 50265, 77)
    upstream = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(1))
    on_device = [leaf.detach().cuda().requires_grad_() for leaf in leaves]
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        given = token_log_probs(*on_device, tokens.cuda(), chunk_rows=chunk_rows)
    expected = _reference(leaves, tokens, torch.float32)
    precision = 8 * torch.finfo(dtype).eps
    assert (given.cpu() - expected).norm() <= precision * expected.norm()
    mine = torch.autograd.grad((given * upstream.cuda()).sum(), on_device)
    theirs = torch.autograd.grad((expected * upstream).sum(), leaves)
    for gradient, wanted in zip(mine, theirs, strict=True):
        assert (gradient.cpu() - wanted).norm() <= precision * wanted.norm()


def test_statistics_are_those_of_the_distributions():
    """With one distribution that is certain, whose entropy is 0 and not NaN."""
    (hidden, weight, bias), _ = _inputs(13, 29, 4)
    hidden = torch.cat([hidden, 1000 * hidden[:1]]).detach()
    log_probs = (hidden @ weight.t() + bias).log_softmax(-1).detach()
    statistics = token_statistics(hidden, weight, bias, chunk_rows=5)
    torch.testing.assert_close(statistics.entropy_nats, torch.distributions.Categorical(logits=log_probs).entropy())
    assert statistics.entropy_nats[-1] == 0
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
