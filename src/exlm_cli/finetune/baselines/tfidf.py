"""TF-IDF of words and pairs of words with linear models: fitted by scikit-learn, kept in a run without pickle.

Axes: N rows, W terms (words and pairs of words), F features (W of one text, 4 W + 1 of two), C outputs.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exlm_cli.errors import CheckpointError
from exlm_cli.finetune.baselines.arrays import read_arrays, write_arrays
from exlm_cli.progress import Progress
from exlm_cli.tasks import metrics
from exlm_cli.tasks.base import FloatArray, Loss

MAX_TERMS = 100_000
"""Terms of the training rows that are read, the most frequent ones."""
_C, _ALPHA = 1.0, 1.0
"""Regularisation of scikit-learn's `LogisticRegression` and `Ridge`: their defaults, so that nothing is tuned."""
_CERTAIN = 27.0
"""Logit of a label that is the same in all training rows."""
_NO_TERM = ""
"""The only term where no training row has a word; no text contains it."""
_TYPES = {
    "terms": ("uint8", 1),
    "idf": ("float64", 1),
    "weight": ("float64", 2),
    "bias": ("float64", 1),
    "is_known": ("bool", 1),
}
"""Type and number of axes of each array of a file; `terms` are the bytes of a JSON list."""


@dataclass(frozen=True)
class Tfidf:
    """A vocabulary, and a linear model for each output.

    A term's weight in a text is its count there times `idf`, and the weights of a text have a Euclidean norm of 1. Two
    texts are the vectors of both, the absolute difference and the product of these, side by side, as Conneau et al.
    (2017) compare sentences, and the cosine, which is the sum of the products: a regularised model of many weights
    finds a sum of all of them only slowly.

    Attributes:
        terms: W words and pairs of words, in the order of the features.
        idf: (W,) inverse document frequencies.
        weight: (F, C).
        bias: (C,).
        is_known: (C,) whether a class is in the training rows; True for labels and values.
    """

    loss: Loss
    terms: tuple[str, ...]
    idf: FloatArray
    weight: FloatArray
    bias: FloatArray
    is_known: NDArray[np.bool_]

    def predict(self, texts: Sequence[tuple[str, ...]]) -> FloatArray:
        """Return (N, C) probabilities or values of rows of one or two texts."""
        outputs_NC = self._features(texts) @ self.weight + self.bias
        outputs_NC[:, ~self.is_known] = -np.inf
        return metrics.to_probabilities(self.loss, outputs_NC)

    def _features(self, texts: Sequence[tuple[str, ...]]) -> Any:
        return _features_of(self._vectorizer, texts)

    @cached_property
    def _vectorizer(self) -> Any:
        vectorizer = _new_vectorizer(vocabulary={term: index for index, term in enumerate(self.terms)})
        vectorizer.idf_ = self.idf
        return vectorizer


def fit_tfidf(
    loss: Loss,
    texts: Sequence[tuple[str, ...]],
    targets_NC: FloatArray,
    num_outputs: int,
    progress: Progress,
    *,
    class_weights: FloatArray | None = None,
    weights_N: FloatArray | None = None,
) -> Tfidf:
    """Fit the vocabulary and the linear models to training rows; the same rows give the same bits.

    Nothing is chosen on the validation rows. A label with one class in its known rows gets that class.

    Args:
        texts: One or two texts of each row.
        targets_NC: NaN where missing; (N, 1) class index for `classes`.
        num_outputs: C.
        progress: Shows the outputs that are fitted.
        class_weights: As in `DownstreamTask`, as the model's loss has them.
        weights_N: As `weights` in `EncodedRows`.
    """
    vectorizer = _new_vectorizer(max_features=MAX_TERMS)
    every, find_terms = [text for of_row in texts for text in of_row], vectorizer.build_analyzer()
    if not any(map(find_terms, every)):
        vectorizer = _new_vectorizer(vocabulary=[_NO_TERM])
    vectorizer.fit(every)
    features_NF = _features_of(vectorizer, texts)
    weight_FC, bias_C = np.zeros((features_NF.shape[1], num_outputs)), np.zeros(num_outputs)
    is_known_C = np.ones(num_outputs, dtype=np.bool_)
    with progress.bar("TF-IDF", targets_NC.shape[1]) as bar:
        for index, target_N in enumerate(targets_NC.T):
            rows = np.flatnonzero(~np.isnan(target_N))
            target_N = target_N[rows]
            own_N = None if weights_N is None else weights_N[rows]
            present = np.unique(target_N)
            if loss == "classes" and len(present):
                is_known_C = np.isin(np.arange(num_outputs), present)
            if loss == "regression" and len(rows):
                weight_FC[:, index], bias_C[index] = _fit_ridge(features_NF[rows], target_N, own_N)
            elif len(present) > 1:
                # of two classes, scikit-learn has the weights of the second one
                columns = present.astype(int) if len(present) > 2 else [int(present[1]) if loss == "classes" else index]
                weight_FC[:, columns], bias_C[columns] = _fit_logistic(
                    features_NF[rows], target_N, metrics.row_weights(loss, class_weights, target_N, index, own_N)
                )
            elif loss == "binary" and len(present):
                bias_C[index] = _CERTAIN if present[0] == 1 else -_CERTAIN
            bar.update(index + 1)
    terms = tuple(vectorizer.get_feature_names_out().tolist())
    return Tfidf(loss, terms, vectorizer.idf_, weight_FC, bias_C, is_known_C)


def _new_vectorizer(**options: Any) -> Any:
    """Return scikit-learn's vectorizer of words of two or more letters or digits, in lower case, and their pairs."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    return TfidfVectorizer(ngram_range=(1, 2), **options)


def _features_of(vectorizer: Any, texts: Sequence[tuple[str, ...]]) -> Any:
    """Return (N, F) sparse features."""
    from scipy import sparse

    parts = [vectorizer.transform(list(column)) for column in zip(*texts, strict=True)]
    if len(parts) == 2:
        product = parts[0].multiply(parts[1])
        parts += [abs(parts[0] - parts[1]), product, sparse.csr_matrix(product.sum(axis=1))]
    return sparse.hstack(parts, format="csr")


def _fit_logistic(
    features_NF: Any, target_N: FloatArray, weights_N: FloatArray | None
) -> tuple[FloatArray, FloatArray]:
    """Return (F, K) weights and (K,) biases of K classes, K = 1 of two."""
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=_C, max_iter=1000).fit(features_NF, target_N, sample_weight=weights_N)
    return model.coef_.T, model.intercept_


def _fit_ridge(features_NF: Any, target_N: FloatArray, weights_N: FloatArray | None) -> tuple[FloatArray, float]:
    from sklearn.linear_model import Ridge

    model = Ridge(alpha=_ALPHA, solver="sparse_cg", tol=1e-6).fit(features_NF, target_N, sample_weight=weights_N)
    return model.coef_, float(model.intercept_)


def write_tfidf(path: Path, fitted: Tfidf) -> None:
    """Write a fitted model as `.npz`.

    Raises:
        CheckpointError: The file cannot be written.
    """
    arrays = {name: getattr(fitted, name) for name in _TYPES if name != "terms"}
    terms = np.frombuffer(json.dumps(fitted.terms).encode(), dtype=np.uint8)
    # packed, weights of zero would look like a bomb
    write_arrays(path, {"terms": terms, **arrays}, is_packed=False)


def read_tfidf(path: Path, hint: str, *, loss: Loss, num_outputs: int, num_texts: int) -> Tfidf:
    """Return what `write_tfidf` wrote.

    Args:
        path: The file.
        hint: How to get it back.
        loss, num_outputs, num_texts: Loss and C of the run; texts of a row.

    Raises:
        CheckpointError: The file is missing or altered, or its arrays are not those of such a model.
    """
    arrays = read_arrays(path, hint, _TYPES, "TF-IDF")
    try:
        terms = json.loads(arrays.pop("terms").tobytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as TF-IDF: its terms are no JSON", hint) from error
    problem = _find_problem(terms, arrays, num_outputs, num_texts)
    if problem:
        raise CheckpointError(f"{path}: not the TF-IDF of this run: {problem}", hint)
    return Tfidf(loss, tuple(terms), **arrays)


def _find_problem(terms: Any, arrays: dict[str, NDArray[Any]], num_outputs: int, num_texts: int) -> str:
    """Return why predicting with these terms and arrays would fail; empty if it would not."""
    if not isinstance(terms, list) or not terms or not all(isinstance(term, str) for term in terms):
        return "its terms are no list of words"
    if len(set(terms)) < len(terms):
        return "a term twice"
    num_features = 4 * len(terms) + 1 if num_texts == 2 else len(terms)
    wanted = {"idf": (len(terms),), "weight": (num_features, num_outputs), "bias": (num_outputs,)}
    if {name: array.shape for name, array in arrays.items()} != wanted | {"is_known": (num_outputs,)}:
        return "other terms, outputs or numbers of texts"
    if not all(np.isfinite(array).all() for array in arrays.values()):
        return "numbers that are not finite"
    return "" if arrays["is_known"].any() else "no class that it knows"
