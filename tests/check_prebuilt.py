"""Compares each host library of an installed wheel that this processor can run with the float64 reference.

Run by `make wheel-check` with the Python of an environment that holds the wheel and nothing of this repository.
"""

import torch

from exlm_cli.ops.alignment import build, library, native, states_alignment_nll


def main() -> None:
    """Fail where a loss or a gradient differs, or where the wheel holds no library for this processor."""
    generator = torch.Generator().manual_seed(0)
    log_emit = -3 * torch.rand(4, 9, 38, generator=generator, dtype=torch.float64)
    edges = torch.randn(4, 38, 38, generator=generator, dtype=torch.float64)
    log_trans = (
        edges.masked_fill(torch.ones(38, 38).tril().bool(), -torch.inf).log_softmax(-1).nan_to_num(nan=-torch.inf)
    )
    lengths = torch.tensor([9, 4, 1, 7]), torch.tensor([38, 18, 6, 30])
    expected = loss_and_gradients(log_emit, log_trans, *lengths, "reference")
    checked = 0
    for level, needed in build.PREBUILT_LEVELS.items():
        if not needed <= build._processor_features():
            continue
        host = library.HostLibrary(build.source_dir() / "prebuilt" / build.prebuilt_name(level))
        native.host_library = lambda host=host: host
        for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 5e-5)):
            found = loss_and_gradients(log_emit.to(dtype), log_trans.to(dtype), *lengths, "native")
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, check_dtype=False)
        checked += 1
    assert checked
    assert library.host_library().path.parent.name == "prebuilt"


def loss_and_gradients(
    log_emit: torch.Tensor, log_trans: torch.Tensor, targets: torch.Tensor, states: torch.Tensor, backend: str
) -> list[torch.Tensor]:
    """Return the losses (B,) and the gradients of their sum."""
    leaves = [log_emit.clone().requires_grad_(), log_trans.clone().requires_grad_()]
    nll = states_alignment_nll(*leaves, targets, states, backend=backend)
    return [nll.detach(), *torch.autograd.grad(nll.sum(), leaves)]


if __name__ == "__main__":
    main()
