"""Rows and longer cells of the study at convergence."""

from pathlib import Path

from exlm_cli.experiments.results import EntropyAt
from harness import read_rows
from study_convergence import LOSS, NAME, differences, entropy_columns, plan, tables


def test_columns_of_entropy_have_one_order_whichever_mask_ratio_a_cell_was_trained_at():
    """A cell lists its own ratio first; the rows of all cells are in one file, whose columns are 15, 38.7, 62.2 %."""
    entropies = [
        EntropyAt.model_construct(mask_ratio=ratio, entropy_bits=bits)
        for ratio, bits in ((0.387, 2.0), (0.15, 1.0), (0.622, 3.0))
    ]

    columns = entropy_columns(entropies)

    assert list(columns.items()) == [
        ("bits_at_0.150", "1.0000"),
        ("bits_at_0.387", "2.0000"),
        ("bits_at_0.622", "3.0000"),
    ]


def test_differences_are_of_the_seeds_that_both_variants_have():
    losses = {("exlm", "1"): 1.5, ("exlm", "2"): 1.25, ("mlm", "2"): 1.5, ("mlm", "3"): 9.0}
    cells = {key: {LOSS: str(loss)} for key, loss in losses.items()}
    assert differences(cells, "exlm", "mlm") == [-0.25]
    assert differences(cells, "exlm", "mlm-plus") == []


def test_longer_cells_have_the_same_ratio_of_steps():
    usual, longer = (
        {cell.label: cell for cell in plan(Path("DATA"), "smiles", times).plan_seed(1)} for times in (1, 3)
    )

    for label in ("exlm-k4-last-p15", "mlm-plus-p15"):
        steps = usual[label].pretrain.train.max_steps
        assert longer[label].pretrain == usual[label].pretrain.changed({"train.max_steps": 3 * steps})


def test_the_lab_note_has_the_tables_of_the_rows():
    note = Path("docs/lab_notes/convergence.md").read_text(encoding="utf-8")

    for shown in tables(read_rows(NAME), times=1):
        assert shown in note
