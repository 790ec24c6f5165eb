"""Expansion of each masked token into k states: expanded tokens, 2D positions and DAG nodes (section 4.2)."""

from dataclasses import dataclass

import numpy as np

from exlm_cli.config.sections import Objective
from exlm_cli.data.masking import IntArray, MaskedSequence


@dataclass(frozen=True)
class ExpandedSequence:
    """One expanded sequence; the fields are those of `Batch`, without padding and batch axis."""

    token_ids: IntArray
    positions: IntArray
    node_index: IntArray
    node_mask: IntArray
    target_ids: IntArray
    target_source: IntArray


def expand(masked: MaskedSequence, num_states_per_mask: int, objective: Objective) -> ExpandedSequence:
    """Replace every masked position by k adjacent copies and list the DAG's nodes.

    Clone c of the mask at position i gets the 2D position (i, c), c = 1..k; everything else gets (j, 0). For
    `objective="mlm"` all positions are (j, 0), and k must be 1.

    Args:
        masked: Sequence of L tokens with T masked positions.
        num_states_per_mask: k.
        objective: Decides the positions.

    Returns:
        Arrays of L + (k - 1) * T positions and k * T + 2 nodes.
    """
    k = num_states_per_mask
    length = len(masked.input_ids)
    num_masks = len(masked.masked_positions)
    is_masked = np.zeros(length, dtype=bool)
    is_masked[masked.masked_positions] = True
    copies = np.where(is_masked, k, 1)
    token_index = np.repeat(np.arange(length), copies)
    first_position = np.cumsum(copies) - copies

    clone = np.zeros(len(token_index), dtype=np.int64)
    inner_nodes = (first_position[masked.masked_positions][:, None] + np.arange(k)).reshape(-1)
    if objective == "exlm":
        clone[inner_nodes] = np.tile(np.arange(1, k + 1), num_masks)
    return ExpandedSequence(
        token_ids=masked.input_ids[token_index],
        positions=np.stack([token_index, clone], axis=1),
        node_index=np.concatenate([[0], inner_nodes, [len(token_index) - 1]]).astype(np.int64),
        node_mask=np.concatenate([[-1], np.repeat(np.arange(num_masks), k), [-1]]).astype(np.int64),
        target_ids=masked.target_ids,
        target_source=masked.target_source,
    )
