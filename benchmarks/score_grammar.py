"""How much of the dependency between the masked words of a grammar sentence a checkpoint has learnt.

The bundled grammar knows the true joint distribution. Between the independence bound (sum of the words' own entropies)
and the truth (entropy of the joint) lies their mutual information; the share of it that a model captures is where its
expected negative log-likelihood lies between the two. Below 0 %: not even each word alone is predicted well.

    python benchmarks/score_grammar.py runs/quickstart "This is [MASK], and I'm very [MASK] to see this."
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from exlm_cli.data.expansion import batch_from_masked_ids
from exlm_cli.data.grammar import independence_bound_nats, joint_entropy_nats, true_joint
from exlm_cli.ops.alignment import states_alignment_nll
from exlm_cli.train.pretrained import Pretrained, load_pretrained


@torch.no_grad()
def expected_nll_nats(pretrained: Pretrained, sentence: str) -> float:
    """Expected nats of all masked words together under the true joint."""
    model, tokenizer = pretrained.model, pretrained.tokenizer
    joint = true_joint(sentence)
    words = [[tokenizer.encode(f" {word}") for word in filling] for filling in joint]
    assert all(len(ids) == 1 for filling in words for ids in filling), "every word must be one token"
    targets = torch.tensor([[ids[0] for ids in filling] for filling in words])
    ids = np.array([tokenizer.cls_id, *tokenizer.encode_with_masks(sentence), tokenizer.sep_id])
    batch = batch_from_masked_ids(
        ids, mask_id=tokenizer.mask_id, pad_id=tokenizer.pad_id,
        num_states_per_mask=model.num_states_per_mask, objective=model.objective,
    )  # fmt: skip
    nodes = model.node_states(batch)
    log_probs_SV = model.node_log_probs(nodes)[0]
    count, num_masks = targets.shape
    nll: Tensor
    if model.transition is None:
        nll = -log_probs_SV[1:-1][torch.arange(num_masks), targets].sum(1)
    else:
        log_emit = torch.where(nodes.is_inner, log_probs_SV.t()[targets], torch.zeros(()))
        log_trans = model.log_transitions(nodes, batch).expand(count, -1, -1)
        lengths = torch.full((count,), num_masks), batch.state_lengths.expand(count)
        nll = states_alignment_nll(log_emit, log_trans, *lengths)
    return float((nll.double() * torch.tensor(list(joint.values()), dtype=torch.float64)).sum())


def main() -> None:
    """Print one line a sentence."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("sentences", nargs="+")
    options = parser.parse_args()
    pretrained = load_pretrained(options.run, device="cpu")
    for sentence in options.sentences:
        joint = true_joint(sentence)
        num_masks = sentence.count("[MASK]")
        truth, bound = joint_entropy_nats(joint) * num_masks, independence_bound_nats(joint) * num_masks
        nll = expected_nll_nats(pretrained, sentence)
        share = (bound - nll) / (bound - truth) if bound - truth > 1e-9 else float("nan")
        print(f"{sentence}: {nll:.3f} nats; independence {bound:.3f}, truth {truth:.3f}: {share:.0%} captured")


if __name__ == "__main__":
    main()
