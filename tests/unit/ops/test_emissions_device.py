"""The LM head on CUDA, run on the CPU: its blocks in torch, and its kernels in the simulator, against log_softmax."""

import pytest
import torch

from exlm_cli.ops import emissions, head_kernels
from exlm_cli.ops.alignment.library import DeviceLibrary
from exlm_cli.ops.emissions import token_log_probs
from exlm_cli.ops.head_kernels import LogitRows
from tests.unit.ops.simulation import ORDERS, simulator

WIDTH = 6
CASES = [
    ((13, 29, 4), 1, torch.float32), ((13, 29, 4), 3, torch.bfloat16), ((3, 5003, 2), 1, torch.bfloat16),
    ((3, 5003, 2), 100, torch.float16), ((2, 64, 300), 100, torch.float32), ((1, 1, 1), 3, torch.float16),
]  # fmt: skip
"""Rows, vocabulary and tokens (part of a pack; several packs a thread; more tokens than threads; the least), rows of a
chunk, and the dtype of products."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _inputs(num_rows: int, vocab_size: int, num_tokens: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((num_rows, WIDTH), (vocab_size, WIDTH), (vocab_size,))
    leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    return leaves, torch.randint(0, vocab_size, (num_rows, num_tokens), generator=generator)


def _reference(leaves: list[torch.Tensor], tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    hidden, weight, bias = leaves
    logits = (hidden.to(dtype) @ weight.to(dtype).t()).double() + bias.double()
    return logits.log_softmax(-1).gather(1, tokens)


@pytest.fixture(params=["torch", "kernels"])
def rows(request: pytest.FixtureRequest, simulated: DeviceLibrary, monkeypatch: pytest.MonkeyPatch) -> str:
    """The operator takes every tensor for one on a device with memory; what computes the rows of a block there."""
    monkeypatch.setattr(emissions, "_is_on_device", lambda tensor: True)
    monkeypatch.setattr(emissions, "_free_bytes", lambda device: 1 << 30)
    monkeypatch.setattr(emissions, "_has_kernels", lambda logits: request.param == "kernels")
    monkeypatch.setattr(emissions, "device_kernels", lambda device: simulated.on(0, 0))
    return str(request.param)


def _score(
    leaves: list[torch.Tensor], tokens: torch.Tensor, chunk_rows: int, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    with torch.autocast("cpu", dtype, enabled=dtype.itemsize == 2):
        return token_log_probs(*leaves, tokens, chunk_rows=chunk_rows)


@pytest.mark.parametrize(("size", "chunk_rows", "dtype"), CASES, ids=str)
def test_values_and_gradients_are_those_of_log_softmax(size, chunk_rows, dtype, rows):
    leaves, tokens = _inputs(*size)
    if len(tokens) > 1:
        tokens[0] = 7  # one row asks for the same token throughout
    upstream = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(1))
    given = _score(leaves, tokens, chunk_rows, dtype)
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_have_the_same_bits_whatever_memory_is_free(dtype, rows, monkeypatch):
    """Of 13 rows in blocks of 3 all are kept, whole blocks that leave room for one at work, or none."""
    leaves, tokens = _inputs(13, 29, 4)
    upstream = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(1))
    row_bytes, results = 64 * dtype.itemsize, []
    for free_rows, kept_rows in ((13, 13), (12, 9), (8, 3), (5, 0), (0, 0)):
        free = round(free_rows * row_bytes / emissions._KEPT_SHARE)
        monkeypatch.setattr(emissions, "_free_bytes", lambda device, free=free: free)
        saved: list[torch.Size] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t.shape) or t, lambda t: t):
            given = _score(leaves, tokens, 3, dtype)
        assert [shape[0] for shape in saved if shape[1:] == (64,)] == [kept_rows]
        results.append([given, *torch.autograd.grad((given * upstream).sum(), leaves)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_no_rows_give_no_probabilities_and_zero_gradients(rows):
    leaves, tokens = _inputs(0, 29, 4)
    result = _score(leaves, tokens, 4)
    assert result.shape == (0, 4)
    assert torch.autograd.grad(result.sum(), leaves[1])[0].eq(0).all()


@pytest.mark.parametrize("rows", ["torch"], indirect=True)
def test_a_float64_bias_is_not_rounded(rows):
    """The kernels have no float64."""
    leaves, tokens = _inputs(5, 29, 4)
    leaves = [leaf.detach().double().div(3).requires_grad_() for leaf in leaves]
    given = _score(leaves, tokens, 4, torch.float64)
    expected = _reference(leaves, tokens, torch.float64)
    mine, theirs = (torch.autograd.grad(result.square().sum(), leaves) for result in (given, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


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


@pytest.mark.usefixtures("rows")
def test_the_operators_keep_their_promises():
    leaves, tokens = _inputs(7, 29, 4)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for chunk_rows, num_kept in ((1, 2), (100, 7)):
        arguments = (*leaves, tokens, chunk_rows, torch.bfloat16, num_kept)
        outcome = torch.library.opcheck(torch.ops.exlm.token_log_probs.default, arguments, test_utils=checks)
        assert set(outcome.values()) == {"SUCCESS"}
