"""A chain beside MLMs and the design that is gone: the figures of C5 and C9, from the rows of `convergence.csv`.

The chain's rows are runs of the command in docs/lab_notes/convergence.md; differences are between runs of one seed.

    python studies/chain_at_equal_cost.py
"""

import numpy as np

from rows import mean_and_half, read_rows

OTHERS = {"MLM": ("mlm", {"38.7": "20000", "62.2": "20000"}), "MLM+": ("mlm-plus", {"38.7": "26000", "62.2": "29800"}),
          "vectors": ("exlm-k4-last", {"38.7": "20000", "62.2": "20000"})}  # fmt: skip
"""Title -> the variant without its mask ratio, and the steps at each."""


def figures(variant: str, steps: str, column: str) -> dict[str, float]:
    """Return a column of the rows on SMILES, by seed."""
    rows = [row for row in read_rows("convergence") if (row["data"], row["variant"]) == ("smiles", variant)]
    return {row["seed"]: float(row[column]) for row in rows if row["steps"] == steps}


def main() -> None:
    """Print means, and differences with their 95 % intervals."""
    for ratio in ("38.7", "62.2"):
        for column in ("loss", "entropy_bits"):
            chain = figures(f"chain-k8-p{ratio}", "20000", column)
            print(f"{ratio} %, {column}: chain {np.mean(list(chain.values())):.3f}, seeds {', '.join(chain)}")
            for title, (name, steps) in OTHERS.items():
                other = figures(f"{name}-p{ratio}", steps[ratio], column)
                mean = np.mean([other[seed] for seed in chain])
                less = mean_and_half([chain[seed] - other[seed] for seed in chain])
                print(f"  less {title} ({mean:.3f}): {less[0]:+.3f} ± {less[1]:.3f}")


if __name__ == "__main__":
    main()
