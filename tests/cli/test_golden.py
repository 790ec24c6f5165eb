"""Errors that a user can meet, whole sentences, one file a command: `tests/cli/golden/<command>.txt`.

Each `$ exlm ...` line there is run; its exit code and its error follow. A new case is a new line. With
`EXLM_UPDATE_GOLDEN=1` the test writes the files anew; read the difference before you commit it.
"""

import gzip
import os
import shlex
from pathlib import Path
from unittest.mock import Mock

import pytest
import requests

from exlm_cli.cli.app import main
from exlm_cli.run_dir import update_run_json
from tests.cli.conftest import link_runs
from tests.unit.finetune.synthetic import make_pretrained
from tests.unit.tasks.glue_files import write_glue
from tests.unit.tasks.squad.test_task import write

GOLDEN = Path(__file__).parent / "golden"
PROMPT = "$ exlm "


def cases_of(file: Path) -> dict[str, str]:
    """Return the exit code and error of each command line, as the file has them."""
    _, *parts = f"\n{file.read_text(encoding='utf-8')}".split(f"\n{PROMPT}")
    pairs = (part.partition("\n") for part in parts)
    return {words: said.rstrip("\n") for words, _, said in pairs}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, made: Path, kernels: Path | None) -> Path:
    """Return a folder with small files, good and bad, a run of a text model, and links to the runs of `made`.

    Beside it is a cache with nothing but kernels, which take seconds to build.
    """
    folder = tmp_path_factory.mktemp("golden") / "work"
    cache = folder.parent / "cache"
    cache.mkdir()
    if kernels is not None:
        (cache / kernels.name).symlink_to(kernels)
    make_pretrained(folder / "runs" / "pretrained")
    link_runs(folder, made)
    (folder / "words.csv").write_text("text,amber,letters\n" + "amber birch,1,5\ncedar daisy,0,5\n" * 20)
    (folder / "molecules.csv").write_text("smiles,active\n" + "CCO,1\nCCN,0\n" * 20)
    (folder / "rows.txt").write_text("some words\n" * 50)
    (folder / "bad.smi").write_text("CCO\nC1CC\n" * 20)
    (folder / "ragged.csv").write_text("id,text\n1,some words\n2,Hello, world\n")
    (folder / "empty.txt").touch()
    (folder / "binary.txt").write_bytes(bytes(range(256)))
    (folder / "cut.txt.gz").write_bytes(gzip.compress(b"words " * 100)[:-10])
    (folder / "notes.doc").write_text("x")
    (folder / "words.txt.bz2").write_text("x")
    (folder / "mac.txt").write_text("one\rtwo\r")
    (folder / "quotes.tsv").write_text('text\ty\n" so\t1\nplain\t0\nthe end "\t1\n')
    (folder / "list.json").write_text("[1, 2]")
    (folder / "typo.yaml").write_text("extends: quickstart-text\nmasking: {mask_porb: 0.3}\n")
    (folder / "missing-section.yaml").write_text("command: pretrain\nobjective: exlm\n")
    (folder / "no-command.yaml").write_text("objective: exlm\n")
    (folder / "not-a-recipe.yaml").write_text("- a\n")
    (folder / "nul.yaml").write_text('extends: quickstart-text\ndata: {train: "a\\0b"}')
    (folder / "new.csv").write_text("mol,active\nCCO,1\n")
    (folder / "linked.csv").symlink_to("new.csv")
    (folder / "one-bad.smi").write_text("CCO\nC1CC\n")
    (folder / "a-no-answer.json").write_text("{}")
    (folder / "rows.parquet").write_text("rows")
    (folder / "file").touch()
    for task in ("rte", "mrpc"):
        write_glue(folder / "data", task)
    (folder / "data/bace.csv").write_text("smiles,Class\nCCO,1\n")
    write(folder / "data", "train-v2.0.json", "Moss")
    write(folder / "data", "dev-v2.0.json", "Tea")
    for name in ("full", "folder.csv", "folder.npz", "unfinished", "run", "empty"):
        (folder / name).mkdir()
    update_run_json(folder / "unfinished", {"command": "finetune"})
    (folder / "run" / "metrics.jsonl").write_text('{"kind": "valid", "step": 0, "loss": 3.0}\n')
    (folder / "empty" / "metrics.jsonl").touch()
    (folder / "damaged").mkdir()
    (folder / "damaged" / "metrics.jsonl").write_text('{"kind": "train", "step": 0, "loss": 3.0}\n{"step": -1}\n')
    (folder / "full" / "mine.txt").touch()
    (folder / "full" / "run.json").write_text("{}")
    return folder


def _cut_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let downloads and the Hub fail as where no name can be resolved."""
    unknown = "[Errno -2] Name or service not known"
    monkeypatch.setattr("requests.get", Mock(side_effect=requests.ConnectionError(unknown)))
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", Mock(side_effect=OSError(unknown)))
    monkeypatch.setattr("pooch.core.time.sleep", lambda _seconds: None)


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("*.txt")), ids=lambda file: file.stem)
def test_errors_are_those_of_the_golden_file(file, inputs, monkeypatch, capsys):
    monkeypatch.chdir(inputs)
    monkeypatch.setenv("EXLM_CACHE_DIR", str(inputs.parent / "cache"))
    _cut_the_network(monkeypatch)
    expected, said = cases_of(file), {}
    before = sorted(inputs.rglob("*"))
    for words in expected:
        code = main(shlex.split(words))
        captured = capsys.readouterr()
        assert captured.out == "", f"{words}: an error writes nothing to stdout"
        assert sorted(inputs.rglob("*")) == before, f"{words}: an error leaves no files"
        error = captured.err[captured.err.index("error: ") :].rstrip()  # messages of progress come before it
        said[words] = f"[exit {code}]\n{error}".replace(str(inputs), "/FOLDER")
    if "EXLM_UPDATE_GOLDEN" in os.environ:
        file.write_text("\n\n".join(f"{PROMPT}{words}\n{text}" for words, text in said.items()) + "\n")
    assert said == cases_of(file)
