"""The LM head on CUDA, run on the CPU: its blocks in torch, and its kernels in the simulator, against log_softmax."""

import pytest
import torch

from exlm_cli.ops import emissions_cuda
from exlm_cli.ops.alignment.library import DeviceLibrary, LogitRows
from exlm_cli.ops.emissions import token_log_probs
from tests.unit.ops.simulation import ORDERS

WIDTH = 6
SIZES = [(13, 29, 4), (3, 5003, 2), (2, 64, 300), (1, 1, 1)]
"""Rows, vocabulary and tokens: part of a pack; several packs a thread; more tokens than threads; the least."""
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
    """The implementation that computes the rows of a block."""
    monkeypatch.setattr(emissions_cuda, "_has_kernels", lambda logits: request.param == "kernels")
    monkeypatch.setattr(emissions_cuda, "device_kernels", lambda device: simulated.on(0, 0))
    return str(request.param)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_values_and_gradients_are_those_of_log_softmax(size, chunk_rows, dtype, rows):
    leaves, tokens = _inputs(*size)
    if len(tokens) > 1:
        tokens[0] = 7  # one row asks for the same token throughout
    upstream = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(1))
    given = emissions_cuda.token_log_probs(*leaves, tokens, chunk_rows, dtype, True)
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


def test_no_rows_give_no_probabilities_and_zero_gradients(rows):
    leaves, tokens = _inputs(0, 29, 4)
    result = emissions_cuda.token_log_probs(*leaves, tokens, 4, torch.bfloat16, True)
    assert result.shape == (0, 4)
    assert torch.autograd.grad(result.sum(), leaves[1])[0].eq(0).all()


@pytest.mark.usefixtures("rows")
def test_a_bias_at_an_odd_address_is_copied():
    leaves, tokens = _inputs(5, 29, 4)
    expected = emissions_cuda.token_log_probs(*leaves, tokens, 4, torch.bfloat16, False)
    shifted = torch.cat([torch.zeros(1), leaves[2].detach()])[1:]
    assert shifted.data_ptr() % 16
    assert torch.equal(emissions_cuda.token_log_probs(*leaves[:2], shifted, tokens, 4, torch.bfloat16, False), expected)


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
        simulated._library.simt_set_order(order)
        log_sums, log_probs = torch.full((4,), torch.nan), torch.full((4, 9), torch.nan)
        gradient = torch.full_like(logits, torch.nan)
        kernels = simulated.on(0, 0)
        kernels.token_log_probs(of_rows, log_sums, log_probs)
        kernels.logit_gradient(of_rows, log_sums, log_probs, grad, gradient)
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


@pytest.mark.parametrize(
    ("rows", "vocab", "message"), [(1, 65, "a size or a stride is negative or too large"), (0, 29, "")]
)
def test_a_layout_that_the_kernels_cannot_read_is_refused(rows, vocab, message, simulated):
    of_rows = LogitRows(torch.zeros(rows, 64), torch.zeros(vocab), torch.zeros(rows, 1, dtype=torch.int64))
    arguments = (of_rows, torch.empty(rows), torch.empty(rows, 1))
    if not message:
        simulated.on(0, 0).token_log_probs(*arguments)
        return
    with pytest.raises(RuntimeError, match=f"^states_alignment_token_log_probs_cuda: {message}$"):
        simulated.on(0, 0).token_log_probs(*arguments)


@pytest.mark.usefixtures("rows")
def test_the_operators_keep_their_promises():
    leaves, tokens = _inputs(7, 29, 4)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for chunk_rows in (1, 100):
        arguments = (*leaves, tokens, chunk_rows, torch.bfloat16, True)
        outcome = torch.library.opcheck(emissions_cuda._forward, arguments, test_utils=checks)
        assert set(outcome.values()) == {"SUCCESS"}
