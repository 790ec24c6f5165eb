"""`result.json` of the cells of the paper's own grid, from Figures 3 and 5, with counts that are p^k exactly."""

import math
from typing import Any

RATIOS = (0.0225, 0.15, 0.387, 0.622, 0.789)
CELLS = [(k, p) for k, ratios in ((1, RATIOS), (2, RATIOS[1:]), (4, RATIOS[2:]), (8, RATIOS[3:])) for p in ratios]
FIGURE_3 = [81.3, 83.6, 83.3, 81.3, 79.6, 81.4, 83.1, 83.3, 81.3, 81.0, 83.2, 82.6, 79.2, 82.8]
FIGURE_5 = [1.62, 2.78, 3.95, 5.79, 7.26, 1.37, 2.30, 3.44, 5.48, 1.23, 1.77, 3.35, 1.22, 1.76]


def paper_results(seeds: tuple[int, ...] = (1,), *, has_task: bool = True) -> list[dict[str, Any]]:
    """Return a result for every cell and seed; seed s adds s - 1 hundredths of a bit."""
    results = []
    for (k, p), entropy, accuracy in zip(CELLS, FIGURE_5, FIGURE_3, strict=True):
        share, num_tokens = p**k, 10_000
        counted = {
            "num_tokens": num_tokens, "expected": share, "expected_with_floor": share, "measured": share,
            "standard_error": math.sqrt(share * (1 - share) / num_tokens),
        }  # fmt: skip
        for seed in seeds:
            bits = entropy + 0.01 * (seed - 1)
            metrics = {"entropy_bits": bits, "loss": bits / 2, "perplexity": 2.0, "mask_accuracy": 0.5}
            task = {"glue/mnli": {"metric": "accuracy", "values": [accuracy / 100 - 0.01, accuracy / 100 + 0.01]}}
            results.append(
                {"num_repeats": k, "mask_ratio": p, "seed": seed, "corruption": counted, "metrics": metrics}
                | {"steps": 50_000, "finetune": task if has_task else {}}
            )
    return results


def diverged(num_repeats: int, mask_ratio: float, seed: int) -> dict[str, Any]:
    """Return the result of a cell that came to no end."""
    whole = next(r for r in paper_results() if (r["num_repeats"], r["mask_ratio"]) == (num_repeats, mask_ratio))
    return {key: whole[key] for key in ("num_repeats", "mask_ratio", "corruption")} | {"seed": seed, "diverged": "loss"}
