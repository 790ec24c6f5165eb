"""The package that docs/extending.md prints, installed unchanged: its task trains, resumes and predicts."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from exlm_cli.config import tasks
from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.load import load_recipe
from tests.cli.asserts import refusal_of, result_of
from tests.unit.finetune.synthetic import WORDS, make_pretrained

DOCUMENT = (Path(__file__).parents[2] / "docs/extending.md").read_text(encoding="utf-8")
QUICK = ["train.max_epochs=1", "train.num_threads=1", "seeds=[1]"]
RUN = ["finetune", "tickets", "urgent", "--data-dir", "desk", "--set", "task.body_column=text"]
RUN += [word for value in QUICK for word in ("--set", value)]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the folder of the installed package, its files taken from the document."""
    package = tmp_path / "site"
    info = package / "ticket_tasks-1.0.dist-info"
    info.mkdir(parents=True)
    module, recipe, settings = (
        next(text for text in re.findall(rf"```{language}\n(.*?)```", DOCUMENT, re.DOTALL) if has in text)
        for language, has in (("python", "InstalledTask"), ("yml", "tickets/urgent"), ("toml", "entry-points"))
    )
    (package / "ticket_tasks.py").write_text(module)
    (package / "tickets.yaml").write_text(recipe)
    entry = settings.partition('[project.entry-points."exlm.tasks"]\n')[2].replace('"', "")
    (info / "entry_points.txt").write_text(f"[exlm.tasks]\n{entry}")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ticket-tasks\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(package)
    tasks._entry_points.cache_clear()
    yield package
    monkeypatch.undo()
    tasks._entry_points.cache_clear()


def test_a_task_of_an_installed_package_trains_resumes_and_predicts(installed, folder, capsys):
    make_pretrained(folder / "runs" / "pretrained")
    (folder / "desk").mkdir()
    rows = [f"{a} {b},{int('amber' in (a, b))}" for a in WORDS for b in WORDS]
    (folder / "desk/tickets.csv").write_text("text,urgent\n" + "\n".join(rows) + "\n")
    result = result_of(capsys, *RUN, "--out", "run")
    assert (result["task"], result["split_sizes"]) == ("tickets/urgent", {"train": 28, "valid": 4, "test": 4})
    recipe = load_recipe("run/recipe.yaml", kind=FinetuneRecipe)
    assert recipe.task.model_dump()["body_column"] == "text"
    again = result_of(capsys, "finetune", "--resume", "run")
    assert again["metrics"] == result["metrics"]
    (folder / "new.csv").write_text("id,text\n1,amber fern\n2,elder\n")
    assert result_of(capsys, "predict", "run", "new.csv", "--out", "new-predicted.csv")["rows"] == 2
    header = (folder / "new-predicted.csv").read_text().partition("\n")[0]
    assert header.startswith("line,id,text,urgent_probability")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["finetune", "tickets"], "which task of tickets? There are urgent, solved"),
        (["finetune", "tickets", "urgnt"], "unknown task `tickets/urgnt`; accepted: tickets/urgent, tickets/solved"),
        ([*RUN, "--set", "task.body_colum=x"], "did you mean `task.body_column`?"),
        ([*RUN[:5], "--set", "task.body_column=[a]"], "`task.body_column`: it should be a valid string"),
        ([*RUN, "--set", "task.doc_stride=3"], "`task.doc_stride` is for squad; tickets/urgent does not use it"),
    ],
)
def test_mistakes_are_found_as_in_tasks_of_our_own(installed, folder, capsys, words, message):
    assert message in refusal_of(capsys, *words, "--dry-run")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import no_such_module", "cannot be loaded: No module named 'no_such_module'"),
        ("", "cannot be loaded: module 'ticket_tasks' has no attribute 'TicketTask'"),
        ("TicketTask = 5", "is not an `InstalledTask`: ticket_tasks:TicketTask"),
        ('SUITE = "others"', "its suite and tasks are not called `tickets/...`"),
    ],
)
def test_a_package_that_does_not_work_is_named_and_other_tasks_go_on(
    installed, folder, capsys, monkeypatch, code, message
):
    path = installed / "ticket_tasks.py"
    text = path.read_text().replace('suite: ClassVar[str] = "tickets"', 'suite: ClassVar[str] = "others"')
    path.write_text(text if code.startswith("SUITE") else code)
    monkeypatch.delitem(sys.modules, "ticket_tasks", raising=False)
    error = refusal_of(capsys, *RUN, "--dry-run")
    assert message in error
    assert "update the package ticket-tasks, or uninstall it" in error
    assert result_of(capsys, "finetune", "glue", "rte", "--dry-run")["task"]["name"] == "glue/rte"


def test_a_recipe_brings_no_code(installed, folder, capsys):
    (folder / "mine.yaml").write_text("extends: csv\ntask: {name: 'os:system/x'}\n")
    assert "unknown task `os:system/x`" in refusal_of(capsys, "finetune", "--recipe", "mine.yaml", "--dry-run")
