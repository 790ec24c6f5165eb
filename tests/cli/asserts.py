"""Runs of commands that must succeed, or must be refused in one line."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from _pytest.capture import CaptureResult

from exlm_cli.cli.app import main


def result_of(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    """Return what a command prints with `--json`."""
    assert main([*map(str, words), "--json"]) == 0, capsys.readouterr().err
    parsed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return parsed


def printed_by(capsys: pytest.CaptureFixture[str], words: Sequence[str]) -> CaptureResult[str]:
    assert main(words) == 0, capsys.readouterr().err
    return capsys.readouterr()


def refusal_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the error and the hint of a command that is refused with nothing on stdout."""
    assert main([*words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    (first,) = [index for index, line in enumerate(lines) if line.startswith("error: ")]
    return "\n".join(filter(None, lines[first:]))
