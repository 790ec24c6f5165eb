"""What inputs resolve to, and the rows and progress of several sources together."""

import gzip
import lzma
import os
import re
from pathlib import Path
from typing import Any

import pytest

from exlm_cli.config.sections import DataConfig
from exlm_cli.data.corpus.inputs import FileSource, iter_rows, resolve_inputs
from exlm_cli.errors import DataError
from exlm_cli.progress import SilentProgress
from tests.recorder import Recorder

TEXT = DataConfig(kind="text")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.txt", "a.txt", "sub/c.csv.gz", "sub/deep/d.jsonl", "notes.pdf", "sub/.hidden.txt", ".git/e.txt"):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text\n")
    return tmp_path / "data"


def _names(inputs: list[str], root: Path) -> list[str]:
    sources = resolve_inputs(inputs, kind="text", progress=SilentProgress())
    return [str(s.path.relative_to(root)) for s in sources if isinstance(s, FileSource)]


def test_a_directory_is_its_readable_files_sorted_and_names_what_it_skips(folder):
    progress = Recorder()
    sources = resolve_inputs([str(folder)], kind="text", progress=progress)
    assert [str(s) for s in sources] == [
        str(folder / n) for n in ("a.txt", "b.txt", "sub/c.csv.gz", "sub/deep/d.jsonl")
    ]
    assert progress.said == [f"{folder}: skipped 1 file of another kind, such as notes.pdf"]


@pytest.mark.parametrize(
    ("pattern", "ending", "pack"),
    [("", "txt", bytes), ("/*.gz", "csv.gz", gzip.compress), ("", "txt.xz", lzma.compress)],
)
def test_empty_parts_of_a_table_are_skipped_and_named(tmp_path, pattern, ending, pack):
    """A file of its own that is empty stops the run, and so does a folder of empty files."""
    parts = [tmp_path / f"part-{number}.{ending}" for number in range(4)]
    for path, text in zip(parts, (b"text\n", b"", b"", b"more\n"), strict=True):
        path.write_bytes(pack(text))
    progress, given = Recorder(), f"{tmp_path}{pattern}"
    sources = resolve_inputs([given], kind="text", progress=progress)
    assert [str(source) for source in sources] == [str(parts[0]), str(parts[3])]
    assert progress.said == [f"{given}: skipped 2 empty files: {parts[1].name}, {parts[2].name}"]
    for path in parts:
        path.write_bytes(pack(b""))
    for one in (given, str(parts[1])):
        with pytest.raises(DataError, match="the file is empty"):
            resolve_inputs([one], kind="text", progress=progress)


def test_a_folder_and_a_glob_read_the_same_files_each_once_also_those_behind_links(folder, tmp_path):
    """`**` matches a folder, what is in it, and a link back to the folder 40 times."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "z.txt").write_text("text\n")
    for name, target in {"linked": tmp_path / "elsewhere", "loop": folder, "sub/alias": folder / "sub/deep"}.items():
        (folder / name).symlink_to(target)
    files = ["a.txt", "b.txt", "linked/z.txt", "sub/alias/d.jsonl", "sub/c.csv.gz"]
    assert _names([str(folder)], folder) == files
    assert _names([f"{folder}/**"], folder) == files
    assert len(_names([f"{folder}/**/*.jsonl"], folder)) == 1


def test_a_folder_that_cannot_be_listed_is_named(folder, monkeypatch):
    """Its rows would be missing otherwise. The error is made up, because root may list everything."""
    scandir = os.scandir

    def refuse(path: str) -> Any:
        if path == f"{folder}/sub/deep":
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=rf"^{re.escape(str(folder))}/sub/deep: cannot be read: Permission denied$"):
        _names([str(folder)], folder)


MISTAKES = {
    "aa.txt": ("aa.txt: no such file", "a.txt?"),
    "no/a.txt": ("no/a.txt: no such file", "there is no folder"),
    "": ("an input is empty", "`.`"),
    "links/*.txt": ("links/gone.txt: a link to elsewhere.txt, which does not exist", "remove it"),
    "pipe.txt": ("pipe.txt: not a regular file", ""),
    "bz2": ("bz2: no file in it that can be read, of 2", "compress it as .gz"),
    "saved": ("saved/train: the rows are in data-0.arrow", '`datasets.load_from_disk("saved/train").to_parquet('),
    "cached/*.arrow": ("a.arrow: unknown extension `.arrow`", 'from_file("cached/a.arrow")'),
    "bundled:poems": ("`bundled:poems` is not bundled; there are `bundled:grammar`", ""),
    "bundled:molecules": ("`bundled:molecules` is smiles, but `data.kind` is text", ""),
}


def test_an_input_that_names_nothing_usable_is_refused(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for name in (
        "links/x.pdf", "bz2/a.txt.bz2", "bz2/README", "saved/dataset_dict.json", "saved/train/data-0.arrow",
        "saved/train/state.json", "saved/train/dataset_info.json", "cached/a.arrow", "cached/dataset_info.json",
    ):  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    (folder / "links" / "gone.txt").symlink_to("elsewhere.txt")
    os.mkfifo(folder / "pipe.txt")
    for given, (message, hint) in MISTAKES.items():
        with pytest.raises(DataError, match=re.escape(message)) as caught:
            resolve_inputs([given], kind="text", progress=SilentProgress())
        assert hint in caught.value.hint


def test_rows_of_all_sources_come_in_order_under_a_bar_of_bytes(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.txt.gz").write_bytes(packed := gzip.compress(b"three\n", mtime=0))
    sources = resolve_inputs([str(tmp_path)], kind="text", progress=SilentProgress())
    progress = Recorder()
    rows = list(iter_rows(sources, TEXT, progress=progress, label="tokenising"))
    assert [(Path(r.source).name, r.number, r.text) for r in rows] == [
        ("a.txt", 1, "one"),
        ("a.txt", 2, "two"),
        ("b.txt.gz", 1, "three"),
    ]
    (bar,) = progress.bars
    assert (bar.label, bar.total, bar.done) == ("tokenising", 8 + len(packed), [8, 8 + len(packed)])


def test_the_most_rows_are_shared_out_over_the_files(tmp_path):
    """A short file leaves its share to those after it; how many rows there are is known at the end."""
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "b.txt").write_text("two\nthree\nfour\nfive\n")

    def read(max_rows: int) -> tuple[list[str], Recorder]:
        progress, data = Recorder(), DataConfig(kind="text", max_rows=max_rows)
        sources = resolve_inputs([f"{tmp_path}/{name}.txt" for name in "aab"], kind="text", progress=SilentProgress())
        return [row.text for row in iter_rows(sources, data, progress=progress)], progress

    texts, progress = read(6)
    assert texts == ["one", "one", "two", "three", "four", "five"]
    assert (progress.bars[0].total, progress.bars[0].done) == (None, [1, 2, 6])
    assert read(3)[0] == ["one", "one", "two"]
    assert read(2)[0] == ["one", "one"]


@pytest.mark.parametrize(("num_done", "max_rows"), [(2, None), (6, None), (6, 7)])
def test_reading_goes_on_after_rows_that_are_done_without_the_files_before_them(tmp_path, num_done, max_rows):
    """Three files of three rows; the ends of those that are done are given, and they are gone."""
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("".join(f"{name}{n}\n" for n in range(3)))
    found = resolve_inputs([str(tmp_path)], kind="text", progress=SilentProgress())
    data, ends = DataConfig(kind="text", max_rows=max_rows), list[int]()
    whole = [row.text for row in iter_rows(found, data, progress=SilentProgress(), ends=ends)]
    assert ends == [3, 6, 9] if max_rows is None else [3, 5, 7]
    before = [end for end in ends if end <= num_done]
    for name in "abc"[: len(before)]:
        (tmp_path / f"{name}.txt").unlink()
    progress = Recorder()
    rest = [row.text for row in iter_rows(found, data, progress=progress, num_done=num_done, ends=before)]
    assert rest == whole[num_done:]
    assert before == ends
    assert progress.bars[0].begun_at == (num_done if max_rows else 9 * sum(end <= num_done for end in ends))


def test_a_source_without_rows_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("\n \n")
    sources = resolve_inputs([str(tmp_path)], kind="text", progress=SilentProgress())
    with pytest.raises(DataError, match=r"a\.txt: no rows in it$"):
        list(iter_rows(sources, TEXT, progress=SilentProgress()))
