"""Values of options, what is refused together, and what the shell completes."""

import pytest
import typer

from exlm_cli.cli import app as shell
from exlm_cli.cli.commands.finetune import complete_suites, complete_tasks
from exlm_cli.cli.options import complete_recipes, complete_settings, parse_formats, split_list
from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.load import list_recipes
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.errors import ConfigError

COMMANDS = typer.main.get_command(shell.app).commands  # type: ignore[attr-defined]


def test_a_list_is_read_as_a_line_of_csv():
    assert split_list('IC50 , "Activity, in nM", "so ""called"""') == ["IC50", "Activity, in nM", 'so "called"']
    assert split_list("") == [""]


def test_formats_are_some_of_those_accepted_or_none():
    assert parse_formats(None, ["csv", "html"]) == parse_formats("none", ["csv", "html"]) == ()
    assert parse_formats("html, csv", ["csv", "html"]) == ("html", "csv")
    for text in ("csv,none", ""):
        with pytest.raises(ConfigError, match="is not one of csv, html"):
            parse_formats(text, ["csv", "html"])


def test_the_shell_completes_only_recipes_that_the_command_takes():
    """`exlm tokenize` reads recipes of pre-training and refuses others."""
    for command, kind in (("tokenize", PretrainRecipe), ("finetune", FinetuneRecipe)):
        context = typer.Context(COMMANDS[command], info_name=command)
        assert complete_recipes(context, "") == list(list_recipes(kind))


def test_the_shell_completes_keys_section_by_section():
    context = typer.Context(COMMANDS["pretrain"], info_name="pretrain")
    assert complete_settings(context, "mod") == ["model."]
    assert complete_settings(context, "see") == ["seed="]
    assert "model.transition." in complete_settings(context, "model.")
    assert complete_settings(context, "no.such") == []


def test_the_shell_completes_suites_and_the_tasks_of_one():
    context = typer.Context(COMMANDS["finetune"], info_name="finetune")
    assert complete_suites("gl") == ["glue"]
    context.params = {"suite": "glue"}
    assert complete_tasks(context, "") == ["mnli", "qqp", "qnli", "sst2", "cola", "rte", "mrpc", "stsb", "all"]
    assert complete_tasks(context, "rte,m") == ["rte,mnli", "rte,mrpc"]
    context.params = {"suite": "csv"}
    assert complete_tasks(context, "") == []
