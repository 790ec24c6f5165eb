"""Validation figures on DAGs whose answers are known by enumeration or by construction; collapses and their cures."""

import itertools
import math

import pytest
import torch

from exlm_cli.errors import CollapsedError
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.train.evaluation import CollapseWatch, evaluate_batch, find_collapse, measure_own_mask_share, summarise
from exlm_cli.train.objective import Objective
from tests.recorder import Recorder
from tests.tiny import SPECIAL, tiny_batch, tiny_recipe


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


OBJECTIVE = Objective(unk_id=4, num_repeats=1, backend="reference")


def _model(**sections) -> ExlmModel:
    torch.manual_seed(0)
    return ExlmModel(tiny_recipe(**({"model": {"init_std": 0.3}} | sections)), SPECIAL.vocab_size).eval()


def _figures(model: ExlmModel, batch) -> dict[str, float]:
    return summarise([evaluate_batch(model, OBJECTIVE, batch)], has_dag=model.transition is not None)


def scored_paths(model: ExlmModel, batch, b: int):
    """Every path of sequence b with its log-probability of emitting the targets."""
    nodes = model.node_states(batch)
    log_probs, log_trans = model.node_log_probs(nodes)[b], model.log_transitions(nodes, batch)[b]
    end, targets = int(batch.state_lengths[b]) - 1, batch.target_ids[b, : int(batch.target_lengths[b])].tolist()
    for path in itertools.combinations(range(1, end), len(targets)):
        score = sum(float(log_trans[v, u]) for v, u in itertools.pairwise((0, *path, end)))
        yield path, score + sum(float(log_probs[u, y]) for u, y in zip(path, targets, strict=True))


def _prior(model: ExlmModel, batch, b: int):
    """The log-probability of every path of sequence b, whatever it emits."""
    log_trans, end = model.log_transitions(model.node_states(batch), batch)[b], int(batch.state_lengths[b]) - 1
    for path in itertools.combinations(range(1, end), int(batch.target_lengths[b])):
        yield sum(float(log_trans[v, u]) for v, u in itertools.pairwise((0, *path, end)))


@pytest.mark.parametrize("is_autocast", [False, True])
def test_dag_figures_are_those_of_enumerated_paths(is_autocast):
    """Under autocast the model rounds to 16 bits; its figures are computed from float32 logits."""
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        _compare_with_enumerated_paths()


def _compare_with_enumerated_paths() -> None:
    model, batch = _model(), tiny_batch(tiny_recipe(), (6, 4))
    figures = _figures(model, batch)
    nodes = model.node_states(batch)
    features = model.lm_head(nodes.packed).float()
    with torch.autocast("cpu", enabled=False):
        logits = features @ model.token_embedding.weight.T + model.lm_head.bias
    node_entropy = torch.zeros(nodes.is_inner.shape)
    node_entropy[nodes.is_inner] = torch.distributions.Categorical(logits=logits).entropy()
    path_entropy, effective, posterior_entropy, zeros, twos, num_masks = 0.0, 0.0, 0.0, 0, 0, 0
    given_length, tokens = 0.0, [0, 0, 0]
    for b in range(2):
        paths = list(scored_paths(model, batch, b))
        norm = math.log(sum(math.exp(s) for _, s in paths))
        probability = {path: math.exp(s - norm) for path, s in paths}
        path_entropy -= sum(p * math.log2(p) for p in probability.values() if p > 0)
        node_mask = batch.node_mask[b].tolist()
        of_length = sum(math.exp(s) for s in _prior(model, batch, b))
        given_length -= (norm - math.log(of_length)) / len(paths[0][0])
        best = max(probability, key=lambda path: probability[path])
        for mask in range(int(batch.target_lengths[b])):
            states = [u for u, m in enumerate(node_mask) if m == mask]
            visited = [sum(p for path, p in probability.items() if u in path) for u in states]
            shares = [v / sum(visited) for v in visited]
            effective += math.exp(-sum(s * math.log(s) for s in shares if s > 0))
            emitted = sum(node_mask[u] == mask for u in best)
            zeros, twos, num_masks = zeros + (emitted == 0), twos + (emitted >= 2), num_masks + 1
        num_targets = len(paths[0][0])
        for i, mask in enumerate((0, num_targets // 2, num_targets - 1)):
            tokens[i] += sum(node_mask[u] == mask for u in best)
        posterior_entropy += sum(p * sum(float(node_entropy[b, u]) for u in path) for path, p in probability.items())
    assert figures["path_entropy_bits"] == pytest.approx(path_entropy / num_masks, rel=1e-4)
    assert figures["effective_states"] == pytest.approx(effective / num_masks, rel=1e-4)
    assert figures["entropy_posterior_bits"] == pytest.approx(posterior_entropy / num_masks / math.log(2), rel=1e-4)
    assert figures["masks_with_0_share"] == zeros / num_masks
    assert figures["masks_with_2plus_share"] == twos / num_masks
    assert figures["loss_given_length"] == pytest.approx(given_length / 2, rel=1e-4)
    assert [figures[f"tokens_of_{place}_mask"] for place in ("first", "middle", "last")] == [n / 2 for n in tokens]
    inner = nodes.is_inner
    assert figures["entropy_bits"] == pytest.approx(float(node_entropy[inner].mean()) / math.log(2), rel=1e-4)


def test_loss_is_the_mean_over_sequences_and_perplexity_its_exponential():
    for sections in ({}, {"objective": "mlm"}, {"model": {"alignment": "independent", "init_std": 0.3}}):
        model = _model(**sections)
        batch = tiny_batch(tiny_recipe(**sections))
        expected = float(OBJECTIVE.sequence_nll(model, batch).mean())
        figures = _figures(model, batch)
        assert figures["loss"] == pytest.approx(expected, rel=1e-5)
        assert figures["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
        if model.transition is None:  # no path whose length could cost anything
            assert figures["loss_given_length"] == figures["loss"]


def test_the_own_mask_share_of_a_model_is_that_of_its_transitions():
    batch = tiny_batch(tiny_recipe(), (6, 4))
    model = _model()
    shares = []
    for b, num_targets in enumerate(batch.target_lengths.tolist()):
        end, node_mask = int(batch.state_lengths[b]) - 1, batch.node_mask[b].tolist()
        paths = list(itertools.combinations(range(1, end), num_targets))
        weights = [math.exp(score) for score in _prior(model, batch, b)]
        own = [sum(node_mask[u] == t for t, u in enumerate(path)) / num_targets for path in paths]
        shares.append(sum(w * o for w, o in zip(weights, own, strict=True)) / sum(weights))
    assert measure_own_mask_share(model, batch) == pytest.approx(sum(shares) / 2, rel=1e-4)


def test_accuracy_of_a_dag_is_that_of_its_best_path_through_the_likeliest_tokens():
    model, batch = _model(), tiny_batch(tiny_recipe(), (6, 4))
    nodes = model.node_states(batch)
    best = model.node_log_probs(nodes).max(-1)
    log_trans = model.log_transitions(nodes, batch)
    correct = total = 0
    for b, num_targets in enumerate(batch.target_lengths.tolist()):
        end = int(batch.state_lengths[b]) - 1

        def score(path, b=b, end=end):
            edges = sum(float(log_trans[b, v, u]) for v, u in itertools.pairwise((0, *path, end)))
            return edges + sum(float(best.values[b, u]) for u in path)

        path = max(itertools.combinations(range(1, end), num_targets), key=score)
        guess = [int(best.indices[b, u]) for u in path]
        correct += sum(g == y for g, y in zip(guess, batch.target_ids[b].tolist(), strict=False))
        total += num_targets
    assert _figures(model, batch)["mask_accuracy"] == correct / total


def test_accuracy_of_an_mlm_is_that_of_its_likeliest_tokens():
    model, batch = _model(objective="mlm"), tiny_batch(tiny_recipe(objective="mlm"))
    nodes = model.node_states(batch)
    guess = model.node_log_probs(nodes).argmax(-1)[nodes.is_inner]
    targets = torch.cat([batch.target_ids[b, :n] for b, n in enumerate(batch.target_lengths.tolist())])
    assert _figures(model, batch)["mask_accuracy"] == float((guess == targets).float().mean())


def test_sums_add_up_over_batches():
    model = _model()
    batches = [tiny_batch(tiny_recipe(), lengths) for lengths in ((9, 4), (12,))]
    apart = summarise([evaluate_batch(model, OBJECTIVE, b) for b in batches], has_dag=True)
    assert apart["num_sequences"] == 3
    losses = torch.cat([OBJECTIVE.sequence_nll(model, b) for b in batches])
    assert apart["loss"] == pytest.approx(float(losses.mean()), rel=1e-5)


def test_entropy_without_a_fully_masked_token_is_not_defined():
    sections = {
        "objective": "mlm",
        "masking": {"num_repeats": 8, "mask_ratio": 0.1, "scheme": "bernoulli"},
        "model": {"init_std": 0.3, "max_length": 128},
    }
    model, batch = _model(**sections), tiny_batch(tiny_recipe(**sections), (7, 5))
    objective = Objective(unk_id=4, num_repeats=8, backend="reference")
    figures = summarise([evaluate_batch(model, objective, batch)], has_dag=False)
    assert math.isnan(figures["entropy_bits"])
    assert figures["loss"] > 0


def test_entropy_of_repeated_mlm_counts_fully_masked_tokens_alone():
    sections = {"objective": "mlm", "masking": {"num_repeats": 2, "mask_ratio": 0.6, "scheme": "bernoulli"}}
    model, batch = _model(**sections), tiny_batch(tiny_recipe(**sections), (7, 5))
    nodes = model.node_states(batch)
    entropy = torch.distributions.Categorical(logits=model.node_log_probs(nodes)[nodes.is_inner]).entropy()
    sources = [(b, s) for b, n in enumerate(batch.target_lengths.tolist()) for s in batch.target_source[b, :n].tolist()]
    counted = [e for e, source in zip(entropy.tolist(), sources, strict=True) if sources.count(source) == 2]
    figures = summarise(
        [evaluate_batch(model, Objective(unk_id=4, num_repeats=2, backend="reference"), batch)], has_dag=False
    )
    assert 0 < len(counted) < len(sources)
    assert figures["entropy_bits"] == pytest.approx(sum(counted) / len(counted) / math.log(2), rel=1e-5)


HEALTHY = {"masks_with_0_share": 0.05, "effective_states": 1.06}
SEEING = {"rope": "nodes", "start": "next_mask"}


def _watched(rows, **train) -> list[str]:
    progress = Recorder()
    watch = CollapseWatch(tiny_recipe(train=train), progress)
    for step, figures in enumerate(rows, start=4):
        watch.on_validate(step, figures)
    return progress.said


def test_each_kind_of_collapse_is_reported_once_and_a_dag_in_use_is_no_news():
    assert _watched([HEALTHY]) == []
    passed_over = HEALTHY | {"masks_with_0_share": 0.32}
    one_state = HEALTHY | {"effective_states": 1.004}
    first, second = _watched([passed_over, passed_over, one_state, one_state])
    assert first == (
        "warning: the DAG of step 4 has collapsed: 32.0 % of the masks yield no token; start a new run with "
        "`model.transition.rope=nodes` and `model.transition.start=next_mask`"
    )
    assert second.startswith("warning: the DAG of step 6 has collapsed: 1.00 of 3 states of a mask are in use; ")


def test_a_run_stops_where_its_recipe_says_so():
    with pytest.raises(CollapsedError, match=r"step 4 has collapsed: 32\.0 % of the masks") as caught:
        _watched([HEALTHY | {"masks_with_0_share": 0.32}], on_collapse="stop")
    assert "`model.transition.start=next_mask`" in caught.value.hint
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("transition", "cure"),
    [
        ({"rope": "nodes"}, "`model.transition.start=next_mask`"),
        ({"start": "lanes"}, "`model.transition.rope=nodes`"),
        (SEEING, "a lower `optim.lr` (now 0.001)"),
    ],
)
def test_a_cure_of_paths_names_what_the_recipe_lacks(transition, cure):
    recipe = tiny_recipe(model={"transition": transition})
    (_, given) = find_collapse(HEALTHY | {"masks_with_0_share": 0.1}, recipe)["passed over"]
    assert given == f"start a new run with {cure}"


def test_a_cure_of_states_names_what_the_recipe_lacks_and_at_last_fewer_states():
    row = HEALTHY | {"effective_states": 1.0}
    assert find_collapse(row, tiny_recipe(masking={"num_states_per_mask": 1})) == {}
    model = {"mask_attention": "first", "clone_embedding": "nodes"}
    (_, cure) = find_collapse(row, tiny_recipe(model=model))["one state"]
    assert cure == "to keep states apart, start a new run with `model.transition.balance=0.1`"
    model["transition"] = {"balance": 0.1}
    (_, cure) = find_collapse(row, tiny_recipe(model=model))["one state"]
    assert cure == "`masking.num_states_per_mask=1` predicts the same for less"
