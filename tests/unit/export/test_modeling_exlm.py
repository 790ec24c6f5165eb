"""Masked inputs of an exported ExLM: logits, DAG and fillings against those that the run itself gives."""

import ast
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import exlm_cli.export.folder
from exlm_cli.dag.build import dag_of_tokens
from exlm_cli.dag.graph import length_log_prob
from exlm_cli.dag.search import SearchProblem, best_sequences
from exlm_cli.export.folder import write_model
from exlm_cli.export.remote_code import MODULES
from exlm_cli.export.source import Source, pretrained_source
from exlm_cli.ops.alignment import states_alignment_nll
from exlm_cli.train.pretrained import load_pretrained
from tests.tiny import OUTPUT
from tests.unit.finetune.synthetic import make_pretrained

pytest.importorskip("transformers")
from exlm_cli.export.modeling_exlm import ExlmForMaskedLM

TOLERANCE = 1e-5


def exported(tmp_path: Path, k: int, model: dict[str, Any]) -> tuple[Source, Any]:
    """Return a run, with weights so large that any mistake shows, and its exported model."""
    masking = {"num_states_per_mask": k, "mask_ratio": 0.4}
    run = make_pretrained(tmp_path / "run", masking=masking, model={"init_std": 0.5, "num_layers": 2, **model})
    source = pretrained_source(load_pretrained(run, device="cpu"))
    (tmp_path / "out").mkdir()
    write_model(source, tmp_path / "out")
    loaded, report = ExlmForMaskedLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return source, loaded.eval()


VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "formula": (2, {"rope": "2d", "transition": {"rope": "none"}}),
    "output": (3, OUTPUT | {"clone_init_std": 0.5, "transition": {"rope": "nodes", "start": "next_mask"}}),
    "output-learned": (2, {"expand": "output", "rope": "none", "learned_positions": True, "clone_init_std": 0.5}),
    "1d-tokens": (1, {"rope": "1d", "rope_base": 500.0, "transition": {"rope": "nodes", "start": "next_mask"}}),
    "2d-lanes": (2, {"rope": "2d", "transition": {"rope": "nodes", "start": "lanes"}}),
    "sparse-fixed": (2, {"transition": {"start": "lanes"}, "alignment": "sparse_dag"}),
    "gated": (3, {"transition": {"heads": 2, "position_features": True}}),
    "learned": (2, {"rope": "none", "learned_positions": True, "transition": {"rope": "nodes"}}),
    "independent": (3, OUTPUT | {"alignment": "independent"}),
}
"""Number of states for each mask, and keys of `model`."""


@pytest.mark.parametrize("variant", VARIANTS)
def test_masked_inputs_give_the_outputs_and_the_dag_of_the_run(tmp_path, variant):
    """A padded batch with different numbers of masks, and none; the run computes each alone, its DAG in float64."""
    source, loaded = exported(tmp_path, *VARIANTS[variant])
    rows = [source.encode(text) for text in ("amber [MASK] fern [MASK] [MASK]", "[MASK]", "birch cedar")]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [source.tokenizer.pad_id] * (longest - len(row)) for row in rows])
    with torch.inference_mode():
        output = loaded(ids, (ids != source.tokenizer.pad_id).long(), output_dag=True)
    for b, row in enumerate(rows):
        ours = source.outputs(row)
        assert float(ours.abs().max()) > 1
        difference = output.logits[b, : len(row)].double() - ours
        assert float(difference.abs().max()) <= TOLERANCE
        dag = dag_of_tokens(source.model, source.tokenizer, source.recipe, np.array(row))  # type: ignore[arg-type]
        nodes = output.num_nodes[b]
        assert nodes == dag.num_nodes
        edges = np.exp(output.log_transitions[b, :nodes, :nodes].numpy())
        np.testing.assert_allclose(edges, dag.trans, rtol=1e-4, atol=1e-6)
        words = output.node_log_probs[b, :nodes].exp().numpy()
        np.testing.assert_allclose(words, np.exp(dag.node_log_probs), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("variant", "copies"), [("formula", 2), ("output", 1)])
def test_the_layers_read_k_copies_of_a_mask_or_one(tmp_path, variant, copies):
    source, loaded = exported(tmp_path, *VARIANTS[variant])
    lengths = set()
    for layer in loaded.esm.encoder.layer:
        layer.LayerNorm.register_forward_hook(lambda _module, inputs, _output: lengths.add(inputs[0].shape[1]))
    row = source.encode("amber [MASK] fern [MASK]")
    loaded(torch.tensor([row]))
    assert lengths == {len(row) + 2 * (copies - 1)}


def test_fillings_are_those_of_the_dag(tmp_path):
    """Those of the search on the run's DAG in float64, each with the probability that the alignment op gives it."""
    source, loaded = exported(tmp_path, 3, {"transition": {"rope": "nodes", "start": "next_mask"}})
    row = source.encode("amber [MASK] fern [MASK]")
    (found,) = loaded.fill_masks(torch.tensor([row]), n=4)
    dag = dag_of_tokens(source.model, source.tokenizer, source.recipe, np.array(row))  # type: ignore[arg-type]
    best, _ = best_sequences(SearchProblem(dag, "exact"), 4)
    assert [tokens for tokens, _ in found] == [tuple(token for _, token in pairs) for _, pairs in best]
    log_trans, num_nodes = torch.from_numpy(dag.log_trans)[None], torch.tensor([dag.num_nodes])
    for tokens, probability in found:
        log_emit = torch.from_numpy(dag.node_log_probs[:, tokens].T.copy())[None]
        nll = states_alignment_nll(log_emit, log_trans, torch.tensor([len(tokens)]), num_nodes)
        assert probability == pytest.approx(math.exp(-nll - length_log_prob(dag)), rel=1e-4)


def test_a_row_without_masks_has_no_fillings(tmp_path):
    source, loaded = exported(tmp_path, 3, {})
    with_mask, without = (source.encode(text) for text in ("amber [MASK]", "amber birch"))
    assert len(with_mask) == len(without)
    assert loaded.fill_masks(torch.tensor([without])) == [[]]
    before, of_mask, after = loaded.fill_masks(torch.tensor([without, with_mask, without]), n=2)
    assert (before, after) == ([], [])
    ((tokens, probability), _) = of_mask
    assert len(tokens) == 1
    assert 0 < probability < 1


def test_what_the_model_cannot_do_is_refused(tmp_path):
    source, loaded = exported(tmp_path, 2, {})
    ids = torch.tensor([source.encode("amber [MASK]")])
    with pytest.raises(ValueError, match="`n=0`: accepted: 1 or more"):
        loaded.fill_masks(ids, n=0)
    with pytest.raises(ValueError, match="this model computes no loss"):
        loaded(ids, labels=ids)
    assert loaded(ids, labels=None).logits.shape[:2] == ids.shape


def test_padding_on_the_left_is_refused(tmp_path):
    source, loaded = exported(tmp_path, 2, {})
    ids = source.encode("amber")
    with pytest.raises(ValueError, match="the padding must be on the right"):
        loaded(torch.tensor([[source.tokenizer.pad_id, *ids]]))


def test_a_mask_that_is_hidden_is_padding(tmp_path):
    source, loaded = exported(tmp_path, 2, {})
    ids = source.encode("amber [MASK] fern")
    hidden = torch.tensor([ids + [source.tokenizer.mask_id] * 2])
    padded = torch.tensor([ids + [source.tokenizer.pad_id] * 2])
    is_shown = (padded != source.tokenizer.pad_id).long()
    with torch.inference_mode():
        of_hidden, of_padded = loaded(hidden, is_shown), loaded(padded, is_shown)
    torch.testing.assert_close(of_hidden.logits, of_padded.logits, rtol=0.0, atol=0.0)


def test_modules_of_one_file_have_no_name_in_common():
    """They are written one after the other, so a second definition would replace the first."""
    package = Path(exlm_cli.export.folder.__file__).parents[1]
    names: list[str] = []
    for module in MODULES:
        for node in ast.parse((package / f"{module}.py").read_text(encoding="utf-8")).body:
            targets = node.targets if isinstance(node, ast.Assign) else [node]
            names += [name for target in targets if (name := getattr(target, "name", getattr(target, "id", None)))]
    assert len(names) > 40
    assert len(names) == len(set(names))
