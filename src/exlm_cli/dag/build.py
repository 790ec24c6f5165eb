"""Construction of a DAG: one forward pass of a checkpoint over a masked sentence."""

import numpy as np
import torch
from torch import Tensor

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.dag.graph import Dag
from exlm_cli.data import IntArray
from exlm_cli.data.batch import batch_from_masked_ids
from exlm_cli.data.molecules import without_atom_maps
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.errors import DataError
from exlm_cli.format import format_number_of, is_unicode, shorten
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.ops.ctc import one_token_log_probs
from exlm_cli.progress import Progress, SilentProgress
from exlm_cli.train.pretrained import Pretrained

MAX_INNER_NODES = 512
"""Limit on the states of all masks: the time of the search for fillings grows with T * S^2."""


def build_dag(pretrained: Pretrained, text: str, *, progress: Progress | None = None) -> Dag:
    """Run the model on a text with [MASK]s and return its DAG.

    Args:
        pretrained: Any pre-trained checkpoint. An MLM or `alignment: independent` gives a chain of one node a mask;
            where the mask has several states, the node's distribution is that of the one token they yield (CTC).
        text: Running text or SMILES; each "[MASK]" is one masked token. A SMILES with masks is no molecule, so it is
            read as written, without atom-map numbers where the model was trained without them.
        progress: Receives a message about tokens that the vocabulary lacks.

    Raises:
        DataError: The text is empty, has no [MASK] or is too long, or the model is a Repeated MLM.
    """
    model, tokenizer, recipe = pretrained.model, pretrained.tokenizer, pretrained.recipe
    _check_sentence(text, is_smiles=recipe.data.kind == "smiles")
    if recipe.data.has_canonical_smiles:
        text = without_atom_maps(text)
    if recipe.masking.num_repeats > 1:
        raise DataError(
            f"{pretrained.checkpoint} is a Repeated MLM (`masking.num_repeats` {recipe.masking.num_repeats}): it reads "
            "repeated text, which `exlm inspect-dag` does not produce",
            "choose an ExLM or MLM with `--checkpoint RUN`",
        )
    input_ids = _encode(tokenizer, text, progress or SilentProgress())
    num_masks = int((input_ids == tokenizer.mask_id).sum())
    _check_size(pretrained, len(input_ids), num_masks)
    return dag_of_tokens(model, tokenizer, recipe, input_ids, text)


def dag_of_tokens(
    model: ExlmModel, tokenizer: Tokenizer, recipe: PretrainRecipe, input_ids: IntArray, text: str = ""
) -> Dag:
    """Run a pre-trained model on (L,) tokens, [CLS], [MASK]s and [SEP] included, and return their DAG."""
    batch = batch_from_masked_ids(
        input_ids[None],
        mask_id=tokenizer.mask_id,
        pad_id=tokenizer.pad_id,
        num_states_per_mask=model.nodes_per_mask,
        expands_input=model.expands_input,
    ).to(model.decoder_weight.device)
    with torch.inference_mode():
        nodes = model.node_states(batch)
        log_probs = model.node_log_probs(nodes)[0].double().cpu()
        if model.chain_head is not None:
            membership_VR = model.chain_head.membership(model.decoder_weight).double().cpu()
            state_TRk = model.chain_head.sort(nodes.gather_inner()).double().cpu()
            log_next_Ukk = model.chain(nodes, batch).log_next[0].double().cpu()
            log_probs, log_trans = _expand_chain(log_probs, state_TRk.mT @ membership_VR.t(), log_next_Ukk)
        elif model.transition is not None:
            log_trans = model.log_transitions(nodes, batch)[0].double().cpu()
        else:
            log_probs = _one_node_per_mask(model, log_probs, tokenizer.unk_id)
            log_trans = torch.full((len(log_probs), len(log_probs)), -torch.inf, dtype=torch.float64)
            log_trans.diagonal(1).zero_()
    return Dag(
        text=text,
        kind=recipe.data.kind,
        node_log_probs=log_probs.numpy(),
        log_trans=log_trans.numpy(),
        num_states_per_mask=model.num_states_per_mask if model.has_dag else 1,
        input_ids=input_ids,
        tokenizer=tokenizer,
        has_transitions=model.has_dag,
    )


def _encode(tokenizer: Tokenizer, text: str, progress: Progress) -> IntArray:
    """Return [CLS], the tokens of a text with its [MASK]s, and [SEP]; report tokens that the vocabulary lacks."""
    ids = tokenizer.encode_with_masks(text.strip())
    num_unknown = ids.count(tokenizer.unk_id)
    if num_unknown:
        progress.message(
            f"the model reads {format_number_of(num_unknown, 'token')} of the input as [UNK]: not in the vocabulary"
        )
    return np.array([tokenizer.cls_id, *ids, tokenizer.sep_id])


def _check_size(pretrained: Pretrained, num_tokens: int, num_masks: int) -> None:
    recipe, k = pretrained.recipe, pretrained.model.num_states_per_mask
    transition = recipe.model.transition
    num_further = (k - 1) * num_masks if pretrained.model.expands_input else 0
    max_inner = MAX_INNER_NODES
    if transition.position_features:
        max_inner = min(max_inner, transition.max_nodes - 2)
    if k * num_masks > max_inner:
        most = max_inner // k
        if num_further:  # the sentence must fit into the model too
            most = min(most, (recipe.model.max_length - num_tokens) // (k - 1))
        raise DataError(
            f"the sentence has {num_masks} masks of {k} states, {k * num_masks:,} nodes; an inspection with this model "
            f"takes at most {max_inner:,}",
            f"mask at most {most} tokens" if most > 0 else "shorten it",
        )
    expanded = num_tokens + num_further
    if expanded > recipe.model.max_length:
        raise DataError(
            f"the sentence has {num_tokens} tokens, {expanded} with its masks expanded; the model takes "
            f"{recipe.model.max_length}",
            "shorten it",
        )


def _expand_chain(log_probs_SV: Tensor, state_TkV: Tensor, log_next_Ukk: Tensor) -> tuple[Tensor, Tensor]:
    """Return distributions and edges of the k states of each mask, for a chain whose masks have one node each.

    Args:
        log_probs_SV: Distributions of the masks between two rows for the ends.
        state_TkV: States' shares of each token.
        log_next_Ukk: Edges.
    """
    mask_TV, num_states = log_probs_SV[1:-1], state_TkV.shape[1]
    log_state_TkV = mask_TV[:, None] + state_TkV.log()
    log_size_Tk = log_state_TkV.logsumexp(-1)
    log_state_TkV = log_state_TkV - log_size_Tk[..., None]
    ends = log_probs_SV[:1]
    num_nodes = len(mask_TV) * num_states + 2
    log_trans = torch.full((num_nodes, num_nodes), -torch.inf, dtype=torch.float64)
    log_trans[0, 1 : num_states + 1] = log_size_Tk[0]
    for mask, log_edge_kk in enumerate(log_next_Ukk):
        start = 1 + mask * num_states
        log_trans[start : start + num_states, start + num_states : start + 2 * num_states] = log_edge_kk
    log_trans[-1 - num_states : -1, -1] = 0.0
    return torch.cat([ends, log_state_TkV.flatten(0, 1), ends]), log_trans


def _one_node_per_mask(model: ExlmModel, log_probs_SV: Tensor, blank_id: int) -> Tensor:
    """Return one distribution a mask for a model without transitions, given that each mask yields one token."""
    inner_TkV = log_probs_SV[1:-1].unflatten(0, (-1, model.num_states_per_mask))
    mask_TV = inner_TkV[:, 0] if model.objective == "mlm" else one_token_log_probs(inner_TkV, blank_id)
    ends = torch.full_like(log_probs_SV[:1], -torch.inf)
    return torch.cat([ends, mask_TV, ends])


def _check_sentence(text: str, *, is_smiles: bool) -> None:
    """Check that an input has something to predict.

    Raises:
        DataError: It is empty, has no [MASK], or contains a lone surrogate.
    """
    example = "c1ccc([MASK])cc1" if is_smiles else "This is [MASK], and I'm very [MASK] to see this."
    hint = f'write [MASK] for each hidden token, as in: exlm inspect-dag "{example}"'
    if not text.strip():
        raise DataError("the sentence is empty", hint)
    if not is_unicode(text):
        raise DataError(f"{shorten(ascii(text), 60)} contains a lone surrogate", hint)
    if "[MASK]" not in text:
        raise DataError(f"there is no [MASK] in {shorten(text, 60)!r}", hint)
