"""Share of the dependency between the masked words of a grammar sentence that a checkpoint has learnt.

The shares of the lab note are of 77e3110, 5e0eb00 and 6cc9e3d.

The bundled grammar knows the true joint distribution. The mutual information is the difference between the independence
bound (sum of the entropies of the single words) and the truth (entropy of the joint). The share that a model captures
is the position of its expected negative log-likelihood between the two. Below 0 % not even single words are predicted
well.

    python studies/score_grammar.py runs/quickstart "This is [MASK], and I'm very [MASK] to see this."
"""

import argparse
from pathlib import Path

import torch

from exlm_cli.dag.build import build_dag
from exlm_cli.ops.alignment import states_alignment_nll
from exlm_cli.train.pretrained import Pretrained, load_pretrained
from grammar_joint import independence_bound_nats, joint_entropy_nats, true_joint


def expected_nll_nats(pretrained: Pretrained, sentence: str) -> float:
    """Return the expected nats of all masked words together under the true joint."""
    tokenizer, joint = pretrained.tokenizer, true_joint(sentence)
    words = [[tokenizer.encode(f" {word}") for word in filling] for filling in joint]
    assert all(len(ids) == 1 for filling in words for ids in filling), "every word must be one token"
    targets = torch.tensor([[ids[0] for ids in filling] for filling in words])
    dag = build_dag(pretrained, sentence)
    probability = torch.tensor(list(joint.values()), dtype=torch.float64)
    if dag.chain is not None:
        return -float((dag.chain.score(targets)[0] * probability).sum())
    is_inner = torch.from_numpy(dag.node_mask >= 0)
    log_emit = torch.from_numpy(dag.node_log_probs).t()[targets].where(is_inner, 0.0)
    log_trans = torch.from_numpy(dag.log_trans).expand(len(joint), -1, -1)
    lengths = torch.full((len(joint),), dag.num_masks), torch.full((len(joint),), dag.num_nodes)
    nll = states_alignment_nll(log_emit, log_trans, *lengths)
    return float((nll * probability).sum())


def main() -> None:
    """Print one line per sentence."""
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
