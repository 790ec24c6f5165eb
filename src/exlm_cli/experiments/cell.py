"""The pre-training of a cell of a sweep: train, then measure. What an earlier process finished is kept.

`<cell>/pretrain/` is an ordinary run; `<cell>/scores.csv` is written when it is measured, or has diverged.
"""

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.sections import MaskingConfig, one_ratio
from exlm_cli.config.sweep import SweepCell
from exlm_cli.data import IntArray
from exlm_cli.data.corpus.prepare import prepare_data
from exlm_cli.data.masking import Masker, Sequences
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.errors import DivergedError
from exlm_cli.experiments.evaluate import measure_entropy
from exlm_cli.experiments.results import find_divergence, masking_of
from exlm_cli.files import write_atomically
from exlm_cli.finetune.scores import MODEL, SCORES_FILE, Origin, Scores, score_rows_of, score_table, scores_csv
from exlm_cli.progress import Progress
from exlm_cli.run_dir import out_or_resume
from exlm_cli.train.pretrain import run_pretraining
from exlm_cli.train.pretrain_task import validation_indices

_COUNTED_SEQUENCES = 2048
"""Training sequences in which corrupted tokens are counted, evenly spread, under the masks of the first epoch."""


def pretrain_and_measure(plan: SweepCell, cell: Path, progress: Progress) -> None:
    """Begin or continue the pre-training of a cell, then write its `scores.csv`.

    Training that diverges ends the cell, not the sweep: `scores.csv` then has the counts of corrupted tokens alone. It
    is not tried again.

    Args:
        plan: What is trained and measured.
        cell: Its folder, made where there is none. No other process may work in it.

    Raises:
        ExlmError: Whatever stops training, interruption included; doing it again continues.
    """
    recipe, run = plan.pretrain, cell / "pretrain"
    counted = _count(recipe, progress)
    scores: dict[str, Scores] = {}
    try:
        if find_divergence(run) is None:
            run_pretraining(recipe, progress=progress, **out_or_resume(run))
            for entropy in measure_entropy(
                run, mask_ratios=plan.mask_ratios, max_sequences=plan.measure_sequences, device=recipe.device
            ):
                scores[masking_of(entropy.mask_ratio)] = {"valid": entropy.metrics}
    except DivergedError as error:
        progress.message(error.message)
    if counted:
        scores.setdefault(masking_of(recipe.masking.mask_ratio), {})["train"] = counted
    rows = [
        row
        for masking, metrics in scores.items()
        for row in score_rows_of(Origin(MODEL, masking, 0, recipe.seed), metrics, {})
    ]
    write_atomically(cell / SCORES_FILE, scores_csv(score_table(rows)))


def _count(recipe: PretrainRecipe, progress: Progress) -> dict[str, float | None]:
    """Count corrupted tokens; none unless masks are drawn token by token, as the law of App. C assumes."""
    if recipe.masking.scheme != "bernoulli":
        return {}
    data = prepare_data(recipe, progress=progress)
    indices = validation_indices(data.train, _COUNTED_SEQUENCES)
    sequences = ((int(index), data.train[int(index)]) for index in indices)
    counts = count_corrupted(sequences, recipe.masking, data.tokenizer, seed=recipe.seed)
    return {f"corrupted_{name}": value for name, value in counts.items()}


def count_corrupted(
    sequences: Iterable[tuple[int, IntArray]], masking: MaskingConfig, tokenizer: Tokenizer, *, seed: int
) -> dict[str, float]:
    """Mask sequences as training does and count the tokens that lost every copy, beside the law of App. C.

    Args:
        sequences: (sample index, (n,) tokens without [CLS] and the last [SEP]).
        masking: Section of the recipe; the law holds for `scheme: bernoulli`.
        tokenizer: Its special tokens inside a sequence are not counted.
        seed: Selects the masks, which are those of the first epoch.

    Returns:
        `num_tokens`, N of App. C: tokens that can be masked, before repetition; `num_corrupted` of them have every copy
        masked, a share `measured`. `expected` is p^k, `expected_with_floor` for k = 1 also the effect of "at least one
        mask a sequence": with probability (1 - p)^n a sequence of n tokens draws no mask and gets one. For k > 1 one
        masked copy corrupts nothing. `standard_error` is the square root of App. C's variance, p^k (1 - p^k) / N.
    """
    ratio, repeats = one_ratio(masking.mask_ratio), masking.num_repeats
    num_tokens, num_corrupted, num_forced = 0, 0, 0.0
    masker, is_ordinary = Masker(masking, tokenizer, seed, 0), tokenizer.is_ordinary
    for index, token_ids in sequences:
        masked = masker.mask(Sequences(token_ids[None], np.array([len(token_ids)]), np.array([index])))
        masked_copies = np.bincount(masked.target_source, minlength=len(token_ids) + 1)
        num_corrupted += int((masked_copies == repeats).sum())
        num_maskable = int(is_ordinary[token_ids].sum())
        num_tokens += num_maskable
        if repeats == 1 and num_maskable:
            num_forced += (1 - ratio) ** num_maskable
    law, divisor = ratio**repeats, max(1, num_tokens)
    return {
        "num_tokens": num_tokens,
        "num_corrupted": num_corrupted,
        "expected": law,
        "expected_with_floor": law + num_forced / divisor,
        "measured": num_corrupted / divisor,
        "standard_error": math.sqrt(law * (1 - law) / divisor),
    }
