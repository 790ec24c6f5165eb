"""Values of options, what is refused together, and what the shell completes."""

import pytest
import typer

from exlm_cli.cli import app as shell
from exlm_cli.cli.commands.finetune import complete_suites, complete_tasks
from exlm_cli.cli.options import (
    collect_overrides,
    complete_recipes,
    complete_settings,
    parse_formats,
    split_list,
)
from exlm_cli.config.load import KINDS, list_recipes
from exlm_cli.errors import ConfigError

COMMANDS = typer.main.get_command(shell.app).commands  # type: ignore[attr-defined]


def test_a_key_that_set_gives_twice_is_refused_and_an_option_wins_over_it():
    with pytest.raises(
        ConfigError, match=r"^`--set data\.train=a` and `--set data\.train =b` both give `data\.train`$"
    ) as c:
        collect_overrides(["data.train=a", "seed=1", "data.train =b"], {})
    assert "`KEY=[A,B]`" in c.value.hint
    assert collect_overrides(["foo", "foo", "=1", "=2"], {}) == ["foo", "foo", "=1", "=2"]
    assert collect_overrides(["seed=1", "data.train=a"], {"seed": 2, "device": None}) == [
        "seed=1", "data.train=a", "seed=2",
    ]  # fmt: skip


def test_a_list_is_read_as_a_line_of_csv():
    assert split_list('IC50 , "Activity, in nM", "so ""called"""') == ["IC50", "Activity, in nM", 'so "called"']
    assert split_list("") == [""]
    assert split_list(None) is None
    with pytest.raises(ConfigError, match="not a list with commas"):
        split_list("A\nB")


def test_formats_are_some_of_those_accepted_or_none():
    assert parse_formats(None, ["csv", "html"]) == parse_formats("none", ["csv", "html"]) == ()
    assert parse_formats("html, csv", ["csv", "html"]) == ("html", "csv")
    for text in ("csv,none", "pdf", ""):
        with pytest.raises(ConfigError, match="is not one of csv, html"):
            parse_formats(text, ["csv", "html"])


@pytest.mark.parametrize(
    ("command", "takes"), [("pretrain", "pretrain"), ("tokenize", "pretrain"), ("finetune", "finetune")]
)
def test_the_shell_completes_only_recipes_that_the_command_takes(command, takes):
    """`exlm tokenize` reads recipes of pre-training and refuses others."""
    context = typer.Context(COMMANDS[command], info_name=command)
    (kind,) = [kind for kind in KINDS if kind.command == takes]
    assert complete_recipes(context, "") == list(list_recipes(kind))
    assert complete_recipes(context, "quick") == [name for name in list_recipes(kind) if name.startswith("quick")]


def test_the_shell_completes_keys_section_by_section():
    context = typer.Context(COMMANDS["pretrain"], info_name="pretrain")
    assert complete_settings(context, "mod") == ["model."]
    assert complete_settings(context, "see") == ["seed="]
    assert "model.transition." in complete_settings(context, "model.")
    assert complete_settings(context, "model.wid") == ["model.width="]
    assert complete_settings(context, "no.such") == []


def test_the_shell_completes_suites_and_the_tasks_of_one():
    context = typer.Context(COMMANDS["finetune"], info_name="finetune")
    assert complete_suites("gl") == ["glue"]
    context.params = {"suite": "glue"}
    assert complete_tasks(context, "") == ["mnli", "qqp", "qnli", "sst2", "cola", "rte", "mrpc", "stsb", "all"]
    assert complete_tasks(context, "rte,m") == ["rte,mnli", "rte,mrpc"]
    context.params = {"suite": "csv"}
    assert complete_tasks(context, "") == []
