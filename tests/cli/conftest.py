"""A current directory and a cache of shards of their own for every command that a test runs."""

from pathlib import Path

import pytest

# a model and data so small that a command takes a second or two
TINY = (
    "device=cpu", "data.bundled_rows=200", "model.width=32", "model.ffn_width=16", "model.num_layers=1",
    "optim.warmup_steps=1",
    "train.max_steps=4", "train.checkpoint_every_steps=2", "train.batch_sequences=4", "train.alignment_backend=torch",
)  # fmt: skip


@pytest.fixture
def tiny() -> list[str]:
    """Return the words that make a quickstart recipe tiny."""
    return [word for value in TINY for word in ("--set", value)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty current directory; the cache of shards is beside it."""
    monkeypatch.setenv("EXLM_CACHE_DIR", str(tmp_path / "cache"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work
