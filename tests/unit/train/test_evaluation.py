"""Validation figures on DAGs whose answers are known by enumeration or by construction; collapses and their cures."""

import itertools
import math
import re

import pytest
import torch

from exlm_cli.data.batch import expand
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.run_dir import MetricsLog, read_metrics
from exlm_cli.train.evaluation import (
    CollapseWatch,
    evaluate_batch,
    find_collapse,
    score_sequences,
    summarise,
)
from exlm_cli.train.objective import Objective
from tests.oracles import enumerate_best, enumerate_nll, enumerate_posteriors, scored_paths
from tests.recorder import Recorder
from tests.tiny import CHAIN, SPECIAL, masked_by_hand, tiny_batch, tiny_recipe


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


OBJECTIVE = Objective(unk_id=4, num_repeats=1, backend="reference")


def _model(**sections) -> ExlmModel:
    torch.manual_seed(0)
    return ExlmModel(tiny_recipe(**({"model": {"init_std": 0.3}} | sections)), SPECIAL.vocab_size).eval()


def _figures(model: ExlmModel, batch) -> dict[str, float]:
    return summarise([evaluate_batch(model, OBJECTIVE, batch)])


def _dag(model: ExlmModel, batch, log_emit: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Return the arguments of the alignment op, with the emissions of the targets or with others."""
    nodes = model.node_states(batch)
    log_emit = model.log_emissions(nodes, batch) if log_emit is None else log_emit
    return log_emit, model.log_transitions(nodes, batch), batch.target_lengths, batch.state_lengths


@pytest.mark.parametrize("is_autocast", [False, True])
def test_dag_figures_are_those_of_enumerated_paths(is_autocast):
    """Under autocast the model rounds to 16 bits; its figures are computed from float32 logits."""
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        _compare_with_enumerated_paths()


def _compare_with_enumerated_paths() -> None:
    model, batch = _model(), tiny_batch(tiny_recipe(), (9, 4))
    assert batch.target_lengths.tolist() == [2, 1]
    figures = _figures(model, batch)
    nodes = model.node_states(batch)
    features = model.lm_head(nodes.gather_inner()).float()
    with torch.autocast("cpu", enabled=False):
        logits = features @ model.decoder_weight.T + model.lm_head.bias
    node_entropy = torch.zeros(nodes.is_inner.shape)
    node_entropy[nodes.is_inner] = torch.distributions.Categorical(logits=logits).entropy()
    dag = _dag(model, batch)
    any_targets = _dag(model, batch, torch.zeros_like(dag[0]))
    loss = float((enumerate_nll(*dag) / batch.target_lengths).mean())
    given_length = (enumerate_nll(*dag) - enumerate_nll(*any_targets)) / batch.target_lengths
    at_nodes_BTS = enumerate_posteriors(*any_targets)[0]
    of_each_BT = (at_nodes_BTS * dag[0].double().exp()).sum(-1).log()
    independent = [-float(of_each[:n].mean()) for of_each, n in zip(of_each_BT, dag[2].tolist(), strict=True)]
    visits_BS = enumerate_posteriors(*dag)[0].sum(1)
    path_entropy, effective, tokens, of_clones = 0.0, 0.0, [], torch.zeros(3)
    for b, (scores, best) in enumerate(zip(scored_paths(*dag), enumerate_best(*dag), strict=True)):
        probability = torch.tensor(list(scores.values()), dtype=torch.float64).softmax(0)
        path_entropy += float(torch.special.entr(probability).sum())
        node_mask, num_targets = batch.node_mask[b], int(batch.target_lengths[b])
        for mask in range(num_targets):
            visits = visits_BS[b, node_mask == mask]
            effective += float(torch.special.entr(visits / visits.sum()).sum().exp())
            of_clones += visits
        tokens.append(node_mask[best[:num_targets]].bincount(minlength=num_targets))
    of_masks = torch.cat(tokens)
    num_masks = len(of_masks)
    assert (figures["loss"], figures["perplexity"]) == pytest.approx((loss, math.exp(loss)), rel=1e-4)
    assert figures["path_entropy_bits"] == pytest.approx(path_entropy / num_masks / math.log(2), rel=1e-4)
    assert figures["effective_states"] == pytest.approx(effective / num_masks, rel=1e-4)
    in_use = torch.special.entr(of_clones / of_clones.sum()).sum().exp()
    assert figures["clones_in_use"] == pytest.approx(float(in_use), rel=1e-4)
    posterior_entropy = float((visits_BS * node_entropy).sum())
    assert figures["entropy_posterior_bits"] == pytest.approx(posterior_entropy / num_masks / math.log(2), rel=1e-4)
    assert figures["masks_with_0_share"] == int((of_masks == 0).sum()) / num_masks
    assert figures["masks_with_2plus_share"] == int((of_masks >= 2).sum()) / num_masks
    assert figures["loss_given_length"] == pytest.approx(float(given_length.mean()), rel=1e-4)
    assert figures["loss_independent"] == pytest.approx(sum(independent) / len(independent), rel=1e-4)
    of_places = sum(of_masks[[0, len(of_masks) // 2, -1]] for of_masks in tokens).tolist()
    assert [figures[f"tokens_of_{place}_mask"] for place in ("first", "middle", "last")] == [n / 2 for n in of_places]
    entropy = float(node_entropy[nodes.is_inner].mean())
    assert figures["entropy_bits"] == pytest.approx(entropy / math.log(2), rel=1e-4)


@pytest.mark.parametrize(
    "sections",
    [{}, {"objective": "mlm"}, {"model": CHAIN | {"init_std": 0.3}}],
    ids=["dag", "mlm", "chain"],
)
def test_scores_are_those_of_one_distribution_over_all_fillings(sections):
    """All pairs of tokens for two masks: together their probabilities sum to 1, and summed over the second token, or
    the first, they are those of a token alone.
    """
    size = SPECIAL.vocab_size
    rows, recipe = [[1, 9, 3, 12, 3, 2]] * size**2, tiny_recipe(**sections)
    targets = [token for pair in itertools.product(range(size), repeat=2) for token in pair]
    batch = expand(
        masked_by_hand(rows, targets),
        recipe.masking.num_states_per_mask,
        expands_input=recipe.expands_input,
        pad_id=SPECIAL.pad_id,
    )
    scores = score_sequences(_model(**sections), OBJECTIVE, batch)
    joint = (-scores.joint_nll.double()).exp().view(size, size)
    assert float(joint.sum()) == pytest.approx(1, rel=1e-4)
    alone = (-scores.token_nll.double()).exp().view(size, size, 2)
    torch.testing.assert_close(joint.sum(1), alone[:, 0, 0], rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(joint.sum(0), alone[0, :, 1], rtol=1e-4, atol=1e-9)


def test_accuracy_of_a_dag_is_that_of_its_best_path_through_the_likeliest_tokens():
    sections = {"model": {"init_std": 0.3}}
    model, batch = _model(**sections), tiny_batch(tiny_recipe(**sections), (12, 7))
    best = model.node_log_probs(model.node_states(batch)).max(-1)
    path = enumerate_best(*_dag(model, batch, best.values[:, None].expand(-1, batch.target_ids.shape[1], -1)))
    guess = best.indices.gather(1, path.clamp(min=0))
    batch.target_ids[path >= 0] = guess[path >= 0]
    assert _figures(model, batch)["mask_accuracy"] == 1.0
    batch.target_ids[0, 0] += 1
    assert _figures(model, batch)["mask_accuracy"] == pytest.approx(1 - 1 / int((path >= 0).sum()))


def test_accuracy_of_an_mlm_is_that_of_its_likeliest_tokens():
    model, batch = _model(objective="mlm"), tiny_batch(tiny_recipe(objective="mlm"))
    nodes = model.node_states(batch)
    batch.target_ids.view(-1)[batch.target_index] = model.node_log_probs(nodes).argmax(-1)[nodes.is_inner]
    assert _figures(model, batch)["mask_accuracy"] == 1.0
    batch.target_ids.view(-1)[batch.target_index[0]] += 1
    assert _figures(model, batch)["mask_accuracy"] == pytest.approx(1 - 1 / len(batch.target_index))


def test_accuracy_without_transitions_is_that_of_the_surest_state_that_is_not_blank():
    """Guesses are the targets; [UNK], the blank, is raised until it is the likeliest token of half of the states."""
    sections = {"model": {"alignment": "independent", "init_std": 1.0}}  # the states of a mask are not alike
    model, batch = _model(**sections), tiny_batch(tiny_recipe(**sections))
    nodes = model.node_states(batch)
    log_probs = model.node_log_probs(nodes)[nodes.is_inner]
    model.lm_head.bias[4] += (log_probs.amax(-1) - log_probs[:, 4]).median()
    best = model.node_log_probs(nodes)[nodes.is_inner].max(-1)
    log_prob, token = (values.unflatten(0, (-1, 3)).tolist() for values in best)
    of_masks = [sorted(zip(*states, strict=True), reverse=True) for states in zip(log_prob, token, strict=True)]
    guesses = [next((token for _, token in states if token != 4), 4) for states in of_masks]
    assert guesses != [states[0][1] for states in of_masks]
    batch.target_ids.view(-1)[batch.target_index] = torch.tensor(guesses)
    assert _figures(model, batch)["mask_accuracy"] == 1.0


def test_entropy_of_repeated_mlm_counts_fully_masked_tokens_alone():
    sections = {"objective": "mlm", "masking": {"num_repeats": 2, "mask_ratio": 0.6, "scheme": "bernoulli"}}
    model, batch = _model(**sections), tiny_batch(tiny_recipe(**sections), (7, 5))
    nodes = model.node_states(batch)
    entropy = torch.distributions.Categorical(logits=model.node_log_probs(nodes)[nodes.is_inner]).entropy()
    sources = [(b, s) for b, n in enumerate(batch.target_lengths.tolist()) for s in batch.target_source[b, :n].tolist()]
    counted = [e for e, source in zip(entropy.tolist(), sources, strict=True) if sources.count(source) == 2]
    figures = summarise([evaluate_batch(model, Objective(unk_id=4, num_repeats=2, backend="reference"), batch)])
    assert 0 < len(counted) < len(sources)
    assert figures["entropy_bits"] == pytest.approx(sum(counted) / len(counted) / math.log(2), rel=1e-5)


def test_sums_of_batches_are_divided_once_and_the_perplexity_can_be_read_again_also_where_a_model_diverges(tmp_path):
    """A batch without masks adds nothing to the clones; shares of 3/4 and 1/4 have a perplexity of 4 / 3^(3/4)."""
    of_clones: list[tuple[float, ...]] = [(3.0, 1.0), ()]
    sums = [{"loss": (1e4, 1), "loss_given_length": (1.0, 1), "clones_in_use": of} for of in of_clones]
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append({"kind": "valid", "step": 1, **summarise(sums)})
    (row,) = read_metrics(log.path)
    assert (row["loss"], row["loss_given_length"]) == (1e4, 1.0)
    assert (row["perplexity"], row["clones_in_use"]) == pytest.approx((math.exp(88), 4 / 3**0.75))


HEALTHY = {"num_sequences": 8.0, "masks_with_0_share": 0.05, "clones_in_use": 1.06}


def _watched(rows) -> list[str]:
    progress = Recorder()
    watch = CollapseWatch(tiny_recipe(), progress)
    for step, figures in enumerate(rows, start=4):
        watch.on_validate(step, figures)
    return progress.said


def test_each_kind_of_collapse_is_reported_once_and_a_dag_in_use_is_no_news():
    assert _watched([HEALTHY]) == []
    passed_over = HEALTHY | {"masks_with_0_share": 0.32}
    one_state = HEALTHY | {"clones_in_use": 1.004}
    first, second = _watched([passed_over, passed_over, one_state, one_state])
    for line, parts in ((first, ("step 4", "32.0 %")), (second, ("step 6", "1.00 of 3 states"))):
        assert all(part in line for part in ("warning: ", *parts))


PATHS, STATES = {"masks_with_0_share": 0.1}, {"clones_in_use": 1.0}


@pytest.mark.parametrize(
    ("figures", "model", "wanted"),
    [
        (PATHS, {}, ["model.transition.rope=nodes", "model.transition.start=next_mask"]),
        (PATHS, {"transition": {"rope": "nodes"}}, ["model.transition.start=next_mask"]),
        (PATHS, {"transition": {"start": "next_mask"}}, ["model.transition.rope=nodes"]),
        (PATHS, {"transition": {"rope": "nodes", "start": "next_mask"}}, ["optim.lr"]),
        (STATES, {}, ["model.transition.balance=0.1"]),
        (STATES, {"transition": {"balance": 0.1}}, ["model.alignment=chain", "model.rope=1d"]),
    ],
)
def test_a_cure_names_what_the_recipe_lacks_and_at_last_another_learning_rate_or_dag(figures, model, wanted):
    ((_, cure),) = find_collapse(HEALTHY | figures, tiny_recipe(model=model)).values()
    assert re.findall(r"(?:model|optim)\.[\w.=]+", cure) == wanted


def test_where_no_state_can_be_out_of_use_none_is_said_to_be():
    """Of one state a mask; of no sequence that has a path, whose share of no visit is the exponential of zero, 1."""
    row = HEALTHY | STATES
    assert find_collapse(row, tiny_recipe(masking={"num_states_per_mask": 1})) == {}
    assert find_collapse(row | {"num_sequences": 0.0}, tiny_recipe()) == {}
