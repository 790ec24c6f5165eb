"""A tokenising that was killed, interrupted or hindered goes on, and its shards are those of an undisturbed one.

Every file of the cache's entry is compared, byte for byte. Batches are small, and where the work stands is recorded
every second one, so that the few hundred rows have several records.
"""

import gzip
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.data.bundled.grammar import sample_sentences
from exlm_cli.data.corpus import write
from exlm_cli.data.corpus.prepare import prepare_data
from exlm_cli.data.corpus.shards import ShardWriter
from exlm_cli.errors import DataError, HubError
from exlm_cli.progress import Progress, SilentProgress
from tests.killed import act_at_call, die_at_call, interrupted_at_call, run_until_killed
from tests.recorder import Recorder
from tests.tiny import tiny_recipe

SENTENCES = list(sample_sentences(220, seed=1))
MOLECULES = ["CCO", "c1ccccc1", "CC(=O)O", "CCN", "C1CC", "C[C@@H](O)F", "CC#N", "OCCO", "c1ccncc1", "CXC", "C" * 40]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(write, "_BATCH_ROWS", 9)
    monkeypatch.setattr(write, "_KEPT_BATCHES", 2)


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    documents = "\n\n".join("\n".join(SENTENCES[start : start + 4]) for start in range(0, 120, 4))
    (tmp_path / "a.txt").write_text(f"{documents}\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress("\n".join(SENTENCES[120:]).encode()))
    (tmp_path / "c.jsonl").write_text('{"text": "one row"}\n{"text": null}\n{"text": "another"}\n')
    (tmp_path / "mols.smi").write_text("\n".join(f"{one}\n{'C' * n}O" for n, one in enumerate(MOLECULES * 8, start=1)))
    (tmp_path / "repeated.smi").write_text("\n".join(MOLECULES * 14))
    (tmp_path / "valid.smi").write_text("\n".join(f"{'C' * n}N" for n in range(1, 60)))
    return tmp_path


CORPORA: dict[str, dict[str, Any]] = {
    "packed": {"train": ["a.txt", "b.txt.gz", "c.jsonl"], "valid_fraction": 0.1},
    "lines": {"train": ["a.txt", "b.txt.gz"], "valid": ["c.jsonl"], "sample_break": "line"},
    "some rows": {"train": ["a.txt", "b.txt.gz"], "max_rows": 150, "valid_fraction": 0.1},
    "smallest hash": {"train": ["a.txt"], "valid_fraction": 1e-9, "sample_break": "line"},
    "bundled": {"train": ["bundled:grammar"], "bundled_rows": 200, "sample_break": "line"},
    "molecules": {"kind": "smiles", "train": ["mols.smi"], "on_invalid": "skip", "valid_fraction": 0.1},
    "smallest hash of molecules": {
        "kind": "smiles", "train": ["repeated.smi"], "on_invalid": "skip", "valid_fraction": 1e-9,
    },
    "spellings": {
        "kind": "smiles", "train": ["mols.smi"], "valid": ["valid.smi"], "on_invalid": "skip", "num_spellings": 3,
        "sequence_length": 64,
    },
}  # fmt: skip


def _recipe(workplace: Path, cache: str, **data: Any) -> PretrainRecipe:
    chosen = {"kind": "text", "sequence_length": 32, "sample_break": "none", "cache_dir": str(workplace / cache)} | data
    for key in ("train", "valid"):
        chosen[key] = [name if ":" in name else str(workplace / name) for name in data.get(key, ())]
    return tiny_recipe(
        data=chosen, tokenizer={"min_frequency": 1, "vocab_size": 280}, model={"max_length": 512},
        train={"microbatch_tokens": 4096},
    )  # fmt: skip


def _prepare(recipe: PretrainRecipe, progress: Progress | None = None) -> None:
    prepare_data(recipe, progress=progress or SilentProgress())


def _entry(workplace: Path, cache: str) -> dict[str, bytes]:
    """Return the files of the one entry of shards, by path; there is nothing beside it."""
    (folder,) = (workplace / cache / "shards").iterdir()
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("corpus", CORPORA)
def test_a_tokenising_that_was_interrupted_ends_like_an_undisturbed_one(workplace, corpus):
    """Once or twice, after shares of the calls that write; there is something to go on with."""
    data = CORPORA[corpus]
    with patch.object(ShardWriter, "add", autospec=True, side_effect=ShardWriter.add) as add:
        _prepare(_recipe(workplace, "whole", **data))
    whole = _entry(workplace, "whole")
    assert {"prepared.json", "rejected.csv", "train/tokens.bin", "valid/meta.json"} <= whole.keys()
    kept = []
    for number, shares in enumerate(((0.5, 0.2), (0.99,))):
        recipe, progress = _recipe(workplace, f"cache-{number}", **data), Recorder()
        for share in shares:
            with interrupted_at_call(ShardWriter, "add", int(share * add.call_count)):
                _prepare(recipe)
        _prepare(recipe, progress)
        assert _entry(workplace, f"cache-{number}") == whole
        kept += [text for text in progress.said if "an interrupted process has left" in text]
    assert len(kept) == 2


def prepare_and_die(workplace: Path, count: int) -> None:
    write._BATCH_ROWS, write._KEPT_BATCHES = 9, 2
    die_at_call(ShardWriter, "add", count)
    _prepare(_recipe(workplace, "cache", **CORPORA["packed"]))


def test_a_tokenising_that_was_killed_goes_on_after_the_rows_that_are_on_disk(workplace):
    """99 rows were written, in batches of 9, of which every second was recorded."""
    _prepare(_recipe(workplace, "whole", **CORPORA["packed"]))
    run_until_killed(prepare_and_die, workplace, 100)
    progress = Recorder()
    _prepare(_recipe(workplace, "cache", **CORPORA["packed"]), progress)
    assert _entry(workplace, "cache") == _entry(workplace, "whole")
    assert [bar.label for bar in progress.bars] == ["tokenising"]
    (said,) = [text for text in progress.said if "going on" in text]
    assert re.fullmatch(r"going on after 90 rows, [\d,]+ tokens, that an interrupted process has left", said)


DAMAGE: dict[str, Callable[[Path, Path], None]] = {
    "no record": lambda folder, record: record.unlink(),
    "damaged record": lambda folder, record: record.write_text("{}}"),
    "cut file": lambda folder, record: (folder / "train/tokens.bin").write_bytes(b""),
    "no files": lambda folder, record: (folder / "valid/offsets.bin").unlink(),
}


def test_what_cannot_be_gone_on_with_is_swept_away(workplace):
    _prepare(_recipe(workplace, "whole", **CORPORA["packed"]))
    for name, damage in DAMAGE.items():
        recipe, progress = _recipe(workplace, name, **CORPORA["packed"]), Recorder()
        with interrupted_at_call(ShardWriter, "add", 100):
            _prepare(recipe)
        damage(*sorted((workplace / name / "shards").iterdir()))
        _prepare(recipe, progress)
        assert not [text for text in progress.said if "going on" in text]
        assert _entry(workplace, name) == _entry(workplace, "whole")


def test_a_hub_that_breaks_off_and_a_disk_that_fills_up_leave_what_is_whole(workplace):
    _prepare(_recipe(workplace, "whole", **CORPORA["packed"]))
    recipe, progress = _recipe(workplace, "cache", **CORPORA["packed"]), Recorder()
    broken, full = HubError("it does not answer", "try again"), OSError(28, "No space left on device")
    for error, said in ((broken, "does not answer"), (full, "cannot be read or written: No space left on device")):
        with pytest.MonkeyPatch.context() as patched:
            act_at_call(ShardWriter, "add", 70, Mock(side_effect=error), set_to=patched.setattr)
            with pytest.raises(DataError, match=said) as caught:
                _prepare(recipe, progress)
    assert caught.value.hint.startswith("free some space, or choose another folder")
    _prepare(recipe, progress)
    assert len([text for text in progress.said if text.startswith("going on after")]) == 2
    assert _entry(workplace, "cache") == _entry(workplace, "whole")
