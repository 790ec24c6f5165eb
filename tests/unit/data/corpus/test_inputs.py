"""What inputs resolve to, and the rows and progress of several sources together."""

import gzip
import os
import re
from pathlib import Path

import pytest

from exlm_cli.data.corpus import inputs as sources
from exlm_cli.data.corpus.inputs import BundledSource, FileSource, iter_rows, resolve_inputs
from exlm_cli.data.rows.hub import HubSource
from exlm_cli.data.rows.records import Record, Row
from exlm_cli.errors import DataError
from exlm_cli.progress import SilentProgress
from tests.unit.data.recording import RecordingProgress


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


def test_a_file_is_itself(folder: Path) -> None:
    source = FileSource(folder / "a.txt", 5)
    assert resolve_inputs([str(folder / "a.txt")], kind="text", progress=SilentProgress()) == [source]


def test_a_directory_is_its_readable_files_sorted_and_says_what_it_leaves_out(folder: Path) -> None:
    progress = RecordingProgress()
    sources = resolve_inputs([str(folder)], kind="text", progress=progress)
    assert [str(s) for s in sources] == [
        str(folder / n) for n in ("a.txt", "b.txt", "sub/c.csv.gz", "sub/deep/d.jsonl")
    ]
    assert progress.messages == [f"{folder}: left out 1 files of other kinds, such as notes.pdf"]


def test_globs_are_sorted_and_take_directories_too(folder: Path) -> None:
    assert _names([f"{folder}/*.txt"], folder) == ["a.txt", "b.txt"]
    assert _names([f"{folder}/**/*.jsonl"], folder) == ["sub/deep/d.jsonl"]
    assert _names([f"{folder}/s*"], folder) == ["sub/c.csv.gz", "sub/deep/d.jsonl"]


def test_a_file_whose_name_looks_like_a_pattern_is_taken_as_it_is(folder: Path) -> None:
    (folder / "[1].txt").write_text("x")
    assert _names([f"{folder}/[1].txt"], folder) == ["[1].txt"]


def test_inputs_keep_their_order(folder: Path) -> None:
    assert _names([f"{folder}/b.txt", f"{folder}/a.txt"], folder) == ["b.txt", "a.txt"]


def test_a_tilde_is_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    assert _names(["~/a.txt"], folder) == ["a.txt"]


def test_names_of_other_worlds() -> None:
    sources = resolve_inputs(["bundled:grammar", "hub:me/corpus/en@valid"], kind="text", progress=SilentProgress())
    assert sources == [BundledSource("grammar"), HubSource("me/corpus", "en", "valid")]
    assert [str(source) for source in sources] == ["bundled:grammar", "hub:me/corpus/en@valid"]


def _refused(given: str, message: str, hint: str, kind: str = "text") -> None:
    with pytest.raises(DataError, match=rf"^{re.escape(message)}$") as caught:
        resolve_inputs([given], kind=kind, progress=SilentProgress())  # type: ignore[arg-type]
    assert caught.value.hint == hint


def test_a_missing_file_is_named_with_the_nearest_one(folder: Path) -> None:
    _refused(f"{folder}/aa.txt", f"{folder}/aa.txt: no such file or directory", f"did you mean {folder}/a.txt?")


def test_files_in_one_word_are_told_to_be_a_list(folder: Path) -> None:
    given = f"{folder}/a.txt, b.txt"
    hint = f"it is read as one name; a list is written `[{folder}/a.txt, b.txt]`, words of a command are set apart"
    _refused(given, f"{given}: no such file or directory", hint)


@pytest.mark.parametrize("given", ["", " "])
def test_an_empty_input_is_not_the_current_directory(folder: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.chdir(folder)
    _refused(given, "an input is empty; accepted: a file, a directory, a glob or hub:NAME", "`.` is this directory")


@pytest.mark.parametrize("given", ["links/gone.txt", "links", "links/*.txt"])
def test_a_link_to_nothing_is_told_so(folder: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    (folder / "links").mkdir()
    (folder / "links" / "gone.txt").symlink_to("elsewhere.txt")
    monkeypatch.chdir(folder)
    message = "links/gone.txt: a link to elsewhere.txt, which does not exist"
    _refused(given, message, "mend the link or remove it")


def test_a_missing_file_without_anything_like_it(folder: Path) -> None:
    hint = f"the current directory is {Path.cwd()}"
    _refused(f"{folder}/zzzzzzzz", f"{folder}/zzzzzzzz: no such file or directory", hint)


def test_a_missing_folder_is_said_to_be_missing(folder: Path) -> None:
    hint = f"there is no folder {folder}/no either; the current directory is {Path.cwd()}"
    _refused(f"{folder}/no/a.txt", f"{folder}/no/a.txt: no such file or directory", hint)


def test_a_pattern_without_a_match_is_an_error(folder: Path) -> None:
    message = f"`{folder}/*.parquet`: the pattern matches no file"
    _refused(f"{folder}/*.parquet", message, f"the current directory is {Path.cwd()}")


def test_an_empty_file_is_an_error(folder: Path) -> None:
    (folder / "empty.txt").touch()
    _refused(f"{folder}/empty.txt", f"{folder}/empty.txt: the file is empty", "")


def test_an_unknown_extension_is_an_error(folder: Path) -> None:
    known = ".txt .smi .tsv .csv .jsonl .json .parquet, each also with .gz or .xz"
    hint = "rename it to say what it is, such as .txt for one row a line"
    _refused(f"{folder}/notes.pdf", f"{folder}/notes.pdf: unknown extension `.pdf`; known are {known}", hint)


def test_what_is_no_regular_file_is_an_error(folder: Path) -> None:
    os.mkfifo(folder / "pipe.txt")
    hint = "write the rows to a file first"
    _refused(f"{folder}/pipe.txt", f"{folder}/pipe.txt: not a regular file", hint)


def test_a_folder_without_a_readable_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_text("x")
    known = ".txt .smi .tsv .csv .jsonl .json .parquet, each also with .gz or .xz"
    _refused(str(tmp_path), f"{tmp_path}: no file in it that can be read, of 1; known are {known}", "")


def test_a_name_the_file_system_refuses_is_an_error() -> None:
    _refused("x" * 5000, f"{'x' * 5000}: cannot be read: File name too long", "")


def test_unknown_bundled_data_is_an_error() -> None:
    names = "`bundled:grammar`, `bundled:feelings`, `bundled:molecules`"
    _refused("bundled:poems", f"`bundled:poems` is not bundled; there are {names}", "")


def test_bundled_data_of_the_other_kind_is_an_error() -> None:
    _refused("bundled:molecules", "`bundled:molecules` is smiles, but `data.kind` is text", "")


def test_rows_of_all_sources_come_in_order_under_a_bar_of_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.txt.gz").write_bytes(packed := gzip.compress(b"three\n"))
    sources = resolve_inputs([str(tmp_path)], kind="text", progress=SilentProgress())
    progress = RecordingProgress()
    rows = list(iter_rows(sources, kind="text", progress=progress, label="tokenising"))
    assert [(Path(r.source).name, r.number, r.text) for r in rows] == [
        ("a.txt", 1, "one"),
        ("a.txt", 2, "two"),
        ("b.txt.gz", 1, "three"),
    ]
    (bar,) = progress.bars
    assert (bar.label, bar.total, bar.done) == ("tokenising", 8 + len(packed), [8, 8 + len(packed)])


def test_the_bar_moves_with_the_bytes_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0123456789abcde\n" * 40_000)
    sources = resolve_inputs([str(tmp_path)], kind="text", progress=SilentProgress())
    progress = RecordingProgress()
    assert sum(1 for _ in iter_rows(sources, kind="text", progress=progress)) == 40_000
    done = progress.bars[0].done
    assert done == sorted(done)
    assert len(done) == 40
    assert 0 < done[0] < done[-1] == 640_000


def test_reading_stops_after_the_most_rows_and_counts_them(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\nthree\n")
    sources = resolve_inputs([f"{tmp_path}/a.txt", f"{tmp_path}/a.txt"], kind="text", progress=SilentProgress())
    progress = RecordingProgress()
    rows = iter_rows(sources, kind="text", max_rows=4, progress=progress)
    assert [row.text for row in rows] == ["one", "two", "three", "one"]
    assert (progress.bars[0].total, progress.bars[0].done) == (4, [3, 4])


def test_the_bar_of_hub_rows_counts_towards_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row("hub", n, "text") for n in range(1, 4)]
    records = [Record("hub", n, {"text": "text"}) for n in range(1, 4)]
    monkeypatch.setattr(sources, "iter_hub_records", lambda *_, **__: iter(records))
    progress = RecordingProgress()
    assert list(iter_rows([HubSource("me/corpus", None, "train")], kind="text", progress=progress)) == rows
    assert (progress.bars[0].total, progress.bars[0].done) == (None, [3])


def test_the_bar_of_bundled_rows_knows_how_many_will_come() -> None:
    progress = RecordingProgress()
    assert sum(1 for _ in iter_rows([BundledSource("grammar")], kind="text", max_rows=7, progress=progress)) == 7
    assert progress.bars[0].total == 7


@pytest.mark.parametrize(("name", "kind"), [("grammar", "text"), ("molecules", "smiles")])
def test_bundled_rows_depend_on_their_number_and_seed(name: str, kind: str) -> None:
    def rows(seed: int) -> list[str]:
        progress = RecordingProgress()
        made = iter_rows([BundledSource(name)], kind=kind, bundled_rows=30, seed=seed, progress=progress)  # type: ignore[arg-type]
        texts = [row.text for row in made]
        assert (progress.bars[0].total, progress.bars[0].done) == (30, [30])
        return texts

    assert len(rows(0)) == 30
    assert rows(0) == rows(0) != rows(1)


def test_a_source_without_rows_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n \n")
    sources = resolve_inputs([str(tmp_path)], kind="text", progress=SilentProgress())
    with pytest.raises(DataError, match=rf"^{re.escape(str(tmp_path))}/a\.txt: no rows in it$") as caught:
        list(iter_rows(sources, kind="text", progress=SilentProgress()))
    assert caught.value.hint == "all of its lines are empty"
    (tmp_path / "a.txt").unlink()
    (tmp_path / "b.csv").write_text("text\n")
    sources = resolve_inputs([str(tmp_path)], kind="text", progress=SilentProgress())
    with pytest.raises(DataError, match=rf"^{re.escape(str(tmp_path))}/b\.csv: no rows in it$") as caught:
        list(iter_rows(sources, kind="text", progress=SilentProgress()))
    assert caught.value.hint == "its first line is taken for the names of its columns; rows stand below"


def test_a_file_that_vanished_is_an_error(tmp_path: Path) -> None:
    sources = [FileSource(tmp_path / "a.txt", 3)]
    message = f"{tmp_path}/a.txt: cannot be opened: No such file or directory"
    with pytest.raises(DataError, match=rf"^{re.escape(message)}$"):
        list(iter_rows(sources, kind="text", progress=SilentProgress()))
