"""CTC against `torch.nn.functional.ctc_loss`, another library's truth: of one target, and as a DAG of the alignment op.

A node stands for a run of frames first..last that all emit one label, so emission of target t there is the sum of the
label's log-probabilities over the run. An edge joins a run to any later one, at the price of blanks in between; runs
begin after blanks and end before them. Labels may repeat: a target that equals the next one must leave a blank behind,
so for it the last frame of the run is that blank. Every CTC path is one path of this DAG, and the other way round.
"""

from itertools import combinations_with_replacement

import pytest
import torch
import torch.nn.functional as F

from exlm_cli.ops.alignment import states_alignment_nll
from exlm_cli.ops.ctc import single_target_ctc_nll
from tests.unit.ops.alignment.dags import Dag

BLANK = 0


@pytest.mark.parametrize("num_states", [1, 2, 4, 7])
def test_loss_is_that_of_torch_and_its_gradient_that_of_finite_differences(num_states):
    logits = torch.randn(num_states, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    log_probs, ones = logits.log_softmax(-1), torch.ones(5, dtype=torch.long)
    expected = F.ctc_loss(log_probs, ones[:, None], ones * num_states, ones, blank=BLANK, reduction="none")
    inputs = [log_probs[..., 1].t().requires_grad_(), log_probs[..., 0].t().requires_grad_()]
    torch.testing.assert_close(single_target_ctc_nll(*inputs), expected)
    assert torch.autograd.gradcheck(single_target_ctc_nll, inputs)


def ctc_dag(log_probs_FV, targets):
    """The DAG of one sequence of F frames, blank 0."""
    num_frames, num_targets = len(log_probs_FV), len(targets)
    # elements before..after of the running sum give the sum over frames before..after-1
    total_FV = torch.cat([torch.zeros_like(log_probs_FV[:1]), log_probs_FV.cumsum(0)])
    runs = list(combinations_with_replacement(range(num_frames), 2))
    first = torch.tensor([0, *(run[0] for run in runs), num_frames])
    after = torch.tensor([0, *(run[1] + 1 for run in runs), num_frames])
    rows = []
    for target, label in enumerate(targets):
        run = total_FV[after, label] - total_FV[first, label]
        if target + 1 < num_targets and targets[target + 1] == label:
            last = (after - 1).clamp(min=0)
            run = total_FV[last, label] - total_FV[first, label] + log_probs_FV[last.clamp(max=num_frames - 1), BLANK]
            run = run.where(last > first, -torch.inf)
        rows.append(run)
    blanks = total_FV[first, BLANK][None, :] - total_FV[after, BLANK][:, None]
    log_trans = blanks.where(first[None, :] >= after[:, None], -torch.inf)
    num_states = len(runs) + 2
    return Dag(torch.stack(rows)[None], log_trans[None], torch.tensor([num_targets]), torch.tensor([num_states]))


@pytest.mark.parametrize(
    ("num_frames", "targets"),
    [(1, [2]), (4, [1, 2]), (3, [1, 2, 3]), (9, [3, 1, 2, 1]), (4, [2, 2]), (9, [1, 1, 2, 2]), (11, [3, 3, 3, 1])],
)
def test_ctc_is_a_special_case(num_frames, targets, backend, dtype):
    logits = torch.randn(num_frames, 4, generator=torch.Generator().manual_seed(num_frames), dtype=torch.float64)
    logits.requires_grad_()
    log_probs = logits.log_softmax(-1)
    expected = F.ctc_loss(
        log_probs[:, None], torch.tensor([targets]), (num_frames,), (len(targets),), blank=BLANK, reduction="none"
    )
    dag = ctc_dag(log_probs, targets)
    nll = states_alignment_nll(dag.log_emit.to(dtype), dag.log_trans.to(dtype), *dag[2:], backend=backend)
    tolerance = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 5e-6, "atol": 5e-5}
    torch.testing.assert_close(nll.double(), expected, **tolerance)
    (expected_grad,) = torch.autograd.grad(expected.sum(), logits, retain_graph=True)
    (grad,) = torch.autograd.grad(nll.sum(), logits)
    torch.testing.assert_close(grad, expected_grad, **tolerance)
