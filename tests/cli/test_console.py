"""What is printed where, and when: lines for logs by a clock of the test, bars on a made-up terminal of 80 columns."""

import io
import json
import math
import os
import re
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.text import Text

from exlm_cli.cli import console
from exlm_cli.cli.console import LineProgress, SafeConsole, TerminalProgress, open_progress
from exlm_cli.report.tables import ReportTable


def lines_of(steps: list[tuple[float, int]], total: int | None, done: int = 0, **fields: str) -> list[str]:
    """Return the lines of a bar that is updated at the given seconds."""
    stream, clock = io.StringIO(), Mock(return_value=0.0)
    with LineProgress(stream, clock).bar("train", total, done=done) as bar:
        for now_s, step in steps:
            clock.return_value = now_s
            bar.update(step, **fields)
    return stream.getvalue().splitlines()


def test_a_log_gets_a_line_every_ten_seconds_and_one_at_the_end():
    steps = [(float(second), second) for second in range(1, 26)]
    assert lines_of(steps, 1000, loss="2.5", speed="9 tokens/s") == [
        "train: 10/1,000, loss 2.5, 9 tokens/s, 0:16:30 left",
        "train: 20/1,000, loss 2.5, 9 tokens/s, 0:16:20 left",
        "train: 25/1,000, loss 2.5, 9 tokens/s, 0:00:25 in all",
    ]
    assert lines_of([(0.1 * step, step) for step in range(1, 21)], 20) == ["train: 20/20, 10/s, 0:00:02 in all"]


def test_the_time_left_of_a_resumed_run_counts_only_what_this_process_does():
    assert lines_of([(10.0, 110)], 200, done=100)[0] == "train: 110/200, 1/s, 0:01:30 left"
    assert lines_of([(10.0, 5000)], None)[0] == "train: 5,000, 500/s"
    assert lines_of([(0.0, 5)], 10) == ["train: 5/10, 0:00:00 in all"]
    assert lines_of([(0.0, 5)], 10, done=5) == lines_of([], 10) == []


def terminal(width: int = 80) -> tuple[TerminalProgress, io.StringIO]:
    stream = io.StringIO()
    return TerminalProgress(SafeConsole(file=stream, force_terminal=True, width=width, color_system=None)), stream


def test_bytes_of_a_file_are_a_share_and_its_rows_are_counted_once():
    fields = {"rows": "30", "rate": "70 rows/s"}
    assert lines_of([(3.0, 200)], 200, **fields) == ["train: 100 %, rows 30, 70 rows/s, 0:00:03 in all"]
    assert lines_of([], 0, **fields) == []


def test_a_bar_shows_count_fields_and_the_time_that_it_took():
    stream, clock = io.StringIO(), Mock(return_value=0.0)
    seen = SafeConsole(file=stream, force_terminal=True, width=80, color_system=None, get_time=clock)
    with TerminalProgress(seen).bar("train", 1500) as bar:
        bar.update(375, loss="7")
        clock.return_value = 65.0
        bar.update(1500, loss="2.250", speed="12,345 tokens/s")
    last = stream.getvalue().rpartition("train")[2].splitlines()[0]
    assert re.search(r"━ 1,500/1,500, loss 2\.250, 12,345 tokens/s +0:01:05$", last)


def test_a_bar_inside_another_vanishes_and_a_message_stays():
    progress, stream = terminal()
    with progress.bar("train", 10) as outer:
        with progress.bar("validate", None, done=3) as inner:
            inner.update(7)
        progress.message("step 5: [loss] 2.5 " + "words " * 15)
        outer.update(10)
    text = stream.getvalue()
    assert re.search(r"step 5: \[loss\] 2\.5 (words ){9}words\s*\n(words ){5}", text)
    assert "validate" not in text.rpartition("words")[2]
    with progress.bar("again", 2) as bar:
        bar.update(1)
    assert "again" in stream.getvalue()


def test_progress_is_lines_where_stderr_is_no_terminal_and_bars_where_it_is(monkeypatch):
    assert isinstance(open_progress(), LineProgress)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(open_progress(), TerminalProgress)


def test_results_go_to_stdout_and_numbers_that_are_not_finite_are_null_in_json_and_told_in_words(capsys):
    console.emit_json({"a": math.nan, "b": [math.inf, 1.5], "c": {"d": -math.inf}})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "a": None, "b": [None, 1.5], "c": {"d": None}
    }  # fmt: skip
    console.emit_pairs({"run": "a", "train_tokens": 12345, "loss": 2.34567, "new": True, "bits": math.nan})
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out == (
        "run           a\ntrain tokens  12,345\nloss          2.3457\nnew           yes\nbits          not defined\n"
    )


def test_lines_that_nobody_can_read_do_not_end_the_work():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        progress = LineProgress(stream)
        progress.message("one")
        progress.message("two")


def test_no_text_moves_the_cursor_or_fills_the_screen(capsys):
    """Control characters are shown as escapes, and names of 30 KB are cut, whatever prints them."""
    hostile = "\x1b[2J\x9b2J\u202e" + "name" * 7500 + "\x07 the reason"
    progress, stream = terminal()
    for way in (progress, LineProgress(stream)):
        way.message(hostile)
        with way.bar(hostile, 3) as bar:
            bar.update(2, loss="\x1b[2J")
    table = ReportTable("t", hostile, (hostile, "b"), (((hostile, "1"),),), notes=(hostile,))
    console.emit_tables([table])
    console.emit_pairs({"name": hostile})
    console.emit_listing(["name"], [["x"]], [[hostile]])
    console.emit_error(hostile, hostile)
    out, err = capsys.readouterr()
    for shown in (stream.getvalue(), out, err):
        assert not re.search("\x1b\\[2J|\x9b|\u202e|\x07", shown)
        assert len(shown) < 20_000
    assert len(err.splitlines()) == 3  # an error, an empty line, and its hint
    console.emit_renderable(Text(hostile))
    console.emit_files([Path("a\nb\x1b[2J")])
    assert re.search("\x1b|\x9b|\u202e|\x07|\nb", capsys.readouterr().out) is None
