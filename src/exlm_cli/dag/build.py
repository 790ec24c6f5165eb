"""Construction of DAGs: forward passes of a checkpoint over masked sentences, many in one.

Axes: B sequences, L tokens, S nodes, V vocabulary, T masks, k states, R classes of tokens, U neighbouring masks.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.dag.chain import ChainOfInput
from exlm_cli.dag.graph import Dag, FloatArray
from exlm_cli.dag.read import MaskedText, read_masked
from exlm_cli.data import IntArray
from exlm_cli.data.batch import Batch, batch_from_masked_ids
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.ops.ctc import one_token_log_probs
from exlm_cli.train.pretrained import Pretrained

_WINDOW_CELLS, _WINDOW_ROWS = 2**25, 64
"""Inputs that are sorted by length together: as many as have distributions of 128 MiB."""
_BATCH_ROWS = 16


def build_dag(pretrained: Pretrained, text: str) -> Dag:
    """Run the model on a text with [MASK]s and return its DAG.

    Args:
        pretrained: Any pre-trained checkpoint. An MLM or `alignment: independent` gives a chain of one node a mask;
            where the mask has several states, the node's distribution is that of the one token they yield (CTC).
        text: As for `read_masked`.

    Raises:
        DataError: As `read_masked`.
    """
    masked = read_masked(pretrained, text)
    (dag,) = dags_of_inputs(pretrained.model, pretrained.tokenizer, pretrained.recipe, [masked])
    return dag


def dag_of_tokens(
    model: ExlmModel, tokenizer: Tokenizer, recipe: PretrainRecipe, input_ids: IntArray, text: str = ""
) -> Dag:
    """Run a pre-trained model on (L,) tokens, [CLS], [MASK]s and [SEP] included, and return their DAG."""
    (dag,) = dags_of_inputs(model, tokenizer, recipe, [MaskedText(text, input_ids)])
    return dag


def dags_of_inputs(
    model: ExlmModel, tokenizer: Tokenizer, recipe: PretrainRecipe, inputs: Sequence[MaskedText]
) -> Iterator[Dag]:
    """Yield the DAGs of inputs in their order, many from one forward pass.

    They are those of each input by itself, but for what float32 rounds.
    """
    first, num_cells = 0, 0
    for last, masked in enumerate(inputs, start=1):
        num_masks = int((masked.input_ids == tokenizer.mask_id).sum())
        num_cells += (model.num_states_per_mask * num_masks + 2) * tokenizer.vocab_size
        if last == len(inputs) or last - first == _WINDOW_ROWS or num_cells > _WINDOW_CELLS:
            yield from _dags_of_window(model, tokenizer, recipe, inputs[first:last])
            first, num_cells = last, 0


def _dags_of_window(
    model: ExlmModel, tokenizer: Tokenizer, recipe: PretrainRecipe, inputs: Sequence[MaskedText]
) -> Iterator[Dag]:
    """Yield the DAGs of inputs that are read at once, in batches of like length."""
    order = sorted(range(len(inputs)), key=lambda row: len(inputs[row].input_ids))
    numbers: dict[int, Callable[[], tuple[Tensor, Tensor]]] = {}
    chains: dict[int, ChainOfInput] = {}
    for start in range(0, len(order), _BATCH_ROWS):
        rows = order[start : start + _BATCH_ROWS]
        batch = batch_from_masked_ids(
            _padded([inputs[row].input_ids for row in rows], tokenizer.pad_id),
            mask_id=tokenizer.mask_id,
            pad_id=tokenizer.pad_id,
            num_states_per_mask=model.num_states_per_mask,
            expands_input=model.expands_input,
        ).to(model.decoder_weight.device)
        if model.chain_head is not None:
            of_rows = dict(zip(rows, _chains_of_batch(model, batch), strict=True))
            chains |= of_rows
            numbers |= {row: partial(_expand_chain, chain) for row, chain in of_rows.items()}
        else:
            numbers |= zip(rows, _numbers_of_batch(model, batch, tokenizer.unk_id), strict=True)
    for row, masked in enumerate(inputs):
        yield Dag(
            text=masked.text,
            kind=recipe.data.kind,
            numbers=partial(_as_arrays, numbers.pop(row)),  # in float64 one at a time
            num_states_per_mask=model.num_states_per_mask if model.has_dag else 1,
            input_ids=masked.input_ids,
            tokenizer=tokenizer,
            has_transitions=model.has_dag,
            chain=chains.pop(row, None),
        )


def _as_arrays(numbers: Callable[[], tuple[Tensor, Tensor]]) -> tuple[FloatArray, FloatArray]:
    log_probs_SV, log_trans_SS = numbers()
    return log_probs_SV.numpy(), log_trans_SS.numpy()


def _padded(rows: Sequence[IntArray], pad_id: int) -> IntArray:
    padded_BL = np.full((len(rows), max(map(len, rows))), pad_id)
    for into_L, tokens in zip(padded_BL, rows, strict=True):
        into_L[: len(tokens)] = tokens
    return padded_BL


@torch.inference_mode()
def _numbers_of_batch(model: ExlmModel, batch: Batch, unk_id: int) -> list[Callable[[], tuple[Tensor, Tensor]]]:
    """Return functions that give the distributions (S, V) and edges (S, S) of each sequence, float64."""
    nodes = model.node_states(batch)
    log_probs_BSV = model.node_log_probs(nodes).cpu()
    num_nodes_B = batch.state_lengths.tolist()
    of_rows = [log_probs_SV[:n] for log_probs_SV, n in zip(log_probs_BSV, num_nodes_B, strict=True)]
    if model.transition is not None:
        log_trans_BSS = model.log_transitions(nodes, batch).cpu()
        return [
            partial(_as_float64, log_probs, log_trans[:n, :n])
            for log_probs, log_trans, n in zip(of_rows, log_trans_BSS, num_nodes_B, strict=True)
        ]
    return [partial(_one_node_per_mask, model, log_probs, unk_id) for log_probs in of_rows]


def _as_float64(log_probs_SV: Tensor, log_trans_SS: Tensor) -> tuple[Tensor, Tensor]:
    return log_probs_SV.double(), log_trans_SS.double()


@torch.inference_mode()
def _chains_of_batch(model: ExlmModel, batch: Batch) -> list[ChainOfInput]:
    """Return the chain of each sequence."""
    assert model.chain_head is not None, "`alignment` is not chain"
    nodes, membership_VR = model.node_states(batch), model.chain_head.membership(model.decoder_weight)
    rows = zip(nodes.states, batch.node_index, model.node_log_probs(nodes), batch.state_lengths.tolist(), strict=True)
    return [
        ChainOfInput(
            model, states_SD[1 : n - 1], position_S[1 : n - 1], membership_VR, own_log_probs=log_probs_SV[1 : n - 1]
        )
        for states_SD, position_S, log_probs_SV, n in rows
    ]


def _expand_chain(chain: ChainOfInput) -> tuple[Tensor, Tensor]:
    """Return distributions and edges of the k states of each mask, as the best filling leads to them."""
    (best,), _ = chain.best(1)
    emit_TkV, start_k, next_Ukk = chain.numbers(torch.tensor(best))
    k, ends = len(start_k), torch.full_like(emit_TkV[0, :1], -torch.inf)
    num_nodes = len(emit_TkV) * k + 2
    log_trans = torch.full((num_nodes, num_nodes), -torch.inf, dtype=torch.float64)
    log_trans[0, 1 : k + 1] = start_k
    for mask, log_edge_kk in enumerate(next_Ukk):
        start = 1 + mask * k
        log_trans[start : start + k, start + k : start + 2 * k] = log_edge_kk
    log_trans[-1 - k : -1, -1] = 0.0
    return torch.cat([ends, emit_TkV.flatten(0, 1), ends]), log_trans


def _one_node_per_mask(model: ExlmModel, log_probs_SV: Tensor, blank_id: int) -> tuple[Tensor, Tensor]:
    """Return one distribution a mask, given that each yields one token, and edges; for a model without transitions."""
    inner_TkV = log_probs_SV[1:-1].double().unflatten(0, (-1, model.num_states_per_mask))
    mask_TV = inner_TkV[:, 0] if model.objective == "mlm" else one_token_log_probs(inner_TkV, blank_id)
    ends = torch.full_like(mask_TV[:1], -torch.inf)
    log_trans = torch.full((len(mask_TV) + 2, len(mask_TV) + 2), -torch.inf, dtype=torch.float64)
    log_trans.diagonal(1).zero_()
    return torch.cat([ends, mask_TV, ends]), log_trans
