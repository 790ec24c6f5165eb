"""TF-IDF with linear models predicts what scikit-learn's does, survives a file, and a hostile file is refused."""

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import sparse
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline

from exlm_cli.errors import CheckpointError
from exlm_cli.finetune.baselines.tfidf import Tfidf, fit_tfidf, read_tfidf, write_tfidf
from exlm_cli.progress import SilentProgress
from tests.unit.finetune.synthetic import WORDS

NAN = math.nan
RNG = np.random.default_rng(5)
TEXTS = [" ".join(RNG.choice(WORDS, size=RNG.integers(2, 7))) for _ in range(80)]
NEW = [*(" ".join(RNG.choice([*WORDS, "gorse"], size=4)) for _ in range(30)), "", "unknown words"]
SINGLE, NEW_SINGLE = [(text,) for text in TEXTS], [(text,) for text in NEW]
HAS = np.array([[float(word in text) for word in WORDS] for text in TEXTS])


def fit(loss: Any, targets: Any, num_outputs: int = 1, texts: Any = SINGLE) -> Tfidf:
    return fit_tfidf(loss, texts, np.array(targets, dtype=float), num_outputs, SilentProgress())


def pipeline(model: Any) -> Any:
    return make_pipeline(TfidfVectorizer(ngram_range=(1, 2)), model)


def test_labels_are_those_of_scikit_learn_over_their_known_rows():
    targets = HAS[:, :3].copy()
    targets[::3, 1] = NAN
    found = fit("binary", targets, 3).predict(NEW_SINGLE)
    for index in range(3):
        known = np.flatnonzero(~np.isnan(targets[:, index]))
        model = pipeline(LogisticRegression(max_iter=1000))
        # the vocabulary is that of all training rows
        model[0].fit(TEXTS)
        model[1].fit(model[0].transform([TEXTS[row] for row in known]), targets[known, index])
        np.testing.assert_allclose(found[:, index], model.predict_proba(NEW)[:, 1], rtol=1e-12)


@pytest.mark.parametrize(("present", "num_classes"), [((0, 2, 3), 5), ((0, 1), 2), ((1, 3), 4)])
def test_classes_are_those_of_scikit_learn_and_unknown_ones_have_no_probability(present, num_classes):
    """Of two classes scikit-learn has one column of weights."""
    target = np.array(present)[(HAS[:, 0] + (HAS[:, 1] if len(present) > 2 else 0)).astype(int)].astype(float)
    found = fit("classes", target[:, None], num_classes).predict(NEW_SINGLE)
    model = pipeline(LogisticRegression(max_iter=1000)).fit(TEXTS, target)
    np.testing.assert_allclose(found[:, list(present)], model.predict_proba(NEW), rtol=1e-9)
    assert not np.delete(found, present, axis=1).any()


def test_values_are_those_of_scikit_learn():
    """Its own solver for dense features is exact."""
    value = np.array([100 + 10.0 * text.count("cedar") + len(text) for text in TEXTS])
    found = fit("regression", value[:, None]).predict(NEW_SINGLE)
    vectorizer = TfidfVectorizer(ngram_range=(1, 2)).fit(TEXTS)
    model = Ridge(solver="cholesky").fit(vectorizer.transform(TEXTS).toarray(), value)
    np.testing.assert_allclose(found[:, 0], model.predict(vectorizer.transform(NEW).toarray()), rtol=1e-5)


def test_pairs_are_both_vectors_their_distance_their_product_and_its_sum():
    pairs = list(zip(TEXTS, TEXTS[1:] + TEXTS[:1], strict=True))
    shared = np.array([len(set(a.split()) & set(b.split())) for a, b in pairs], dtype=float)
    found = fit("classes", (shared > 2)[:, None], 2, pairs).predict(pairs[::-1])
    vectorizer = TfidfVectorizer(ngram_range=(1, 2)).fit([text for pair in pairs for text in pair])
    a, b = (vectorizer.transform(column).toarray() for column in zip(*pairs, strict=True))
    features = np.hstack([a, b, abs(a - b), a * b, (a * b).sum(1, keepdims=True)])
    model = LogisticRegression(max_iter=1000).fit(sparse.csr_matrix(features), shared > 2)
    np.testing.assert_allclose(found, model.predict_proba(features[::-1]), rtol=1e-9)


def test_what_is_the_same_in_all_rows_is_predicted():
    targets = np.stack([np.ones(80), np.zeros(80), np.full(80, NAN)], axis=1)
    found = fit("binary", targets, 3).predict(NEW_SINGLE[:1])
    np.testing.assert_allclose(found, [[1, 0, 0.5]], atol=1e-11)
    assert fit("classes", np.full((80, 1), 2.0), 4).predict(NEW_SINGLE[:1]).tolist() == [[0, 0, 1, 0]]
    assert fit("classes", np.full((80, 1), NAN), 4).predict(NEW_SINGLE[:1]).tolist() == [[0.25] * 4]
    values = fit("regression", np.stack([np.full(80, 7.5), np.full(80, NAN)], axis=1), 2).predict(NEW_SINGLE[:1])
    np.testing.assert_allclose(values, [[7.5, 0]])


def test_texts_without_a_word_have_the_frequencies_of_the_labels():
    texts, labels = [("!",), ("a",), ("",), ("?",)], [[1], [0], [0], [0]]
    assert fit("binary", labels, 1, texts).predict([("!",), ("amber",)])[:, 0] == pytest.approx([0.25] * 2, abs=1e-3)
    assert fit("regression", labels, 1, texts).predict([("amber",)]).tolist() == [[0.25]]


@pytest.fixture(scope="module")
def fitted() -> Tfidf:
    return fit("binary", HAS[:, :3], 3)


def read(path: Any, **changes: Any) -> Tfidf:
    return read_tfidf(path, "try again", **{"loss": "binary", "num_outputs": 3, "num_texts": 1} | changes)


def test_a_file_gives_the_same_predictions(fitted, tmp_path):
    write_tfidf(tmp_path / "t.npz", fitted)
    again = read(tmp_path / "t.npz")
    assert again.terms == fitted.terms
    assert again.predict(NEW_SINGLE).tobytes() == fitted.predict(NEW_SINGLE).tobytes()


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (lambda f: replace(f, terms=[]), "its terms are no list of words"),
        (lambda f: replace(f, terms=[1, *f.terms[1:]]), "its terms are no list of words"),
        (lambda f: replace(f, terms=(f.terms[1], *f.terms[1:])), "a term twice"),
        (lambda f: replace(f, terms=f.terms[1:]), "other terms, outputs or numbers of texts"),
        (lambda f: replace(f, weight=f.weight[:, 1:]), "other terms, outputs or numbers of texts"),
        (lambda f: replace(f, weight=f.weight * NAN), "numbers that are not finite"),
        (lambda f: replace(f, is_known=~f.is_known), "no class that it knows"),
    ],
)
def test_arrays_of_no_such_model_are_refused(fitted, tmp_path, change, finding):
    write_tfidf(tmp_path / "t.npz", change(fitted))
    with pytest.raises(CheckpointError, match=re.escape(finding)):
        read(tmp_path / "t.npz")


def test_terms_that_are_no_json_and_rows_of_more_texts_are_refused(fitted, tmp_path):
    path = tmp_path / "t.npz"
    arrays = {name: getattr(fitted, name) for name in ("idf", "weight", "bias", "is_known")}
    for terms in (b"\xff", b"[" * 100_000):
        np.savez(path, terms=np.frombuffer(terms, dtype=np.uint8), **arrays)
        with pytest.raises(CheckpointError, match="its terms are no JSON"):
            read(path)
    write_tfidf(path, fitted)
    with pytest.raises(CheckpointError, match="numbers of texts"):
        read(path, num_texts=2)


@pytest.mark.parametrize("loss", ["binary", "classes"])
def test_balanced_weights_make_rare_rows_as_likely_as_others(loss):
    """Of texts without a known word only the intercept counts; one row in four is positive."""
    targets = (np.arange(40) % 4 == 0)[:, None].astype(float)
    weights = np.array([2 / 3, 2.0] if loss == "classes" else [3.0])
    num = 2 if loss == "classes" else 1
    for class_weights, share in ((None, 0.25), (weights, 0.5)):
        fitted = fit_tfidf(loss, [("",)] * 40, targets, num, SilentProgress(), class_weights=class_weights)
        assert fitted.predict([("",)])[0, -1] == pytest.approx(share, abs=1e-4)
