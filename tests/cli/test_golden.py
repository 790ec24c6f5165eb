"""Errors that a user can meet, whole sentences, one file a command: `tests/cli/golden/<command>.txt`.

Each `$ exlm ...` line there is run; its exit code and its error follow. A new error is a new line, under one of the
commands that meet it. With `EXLM_UPDATE_GOLDEN=1` the test writes the files anew; read the difference then.
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


FILES = {
    "words.csv": "text,amber,letters\n" + "amber birch,1,5\ncedar daisy,0,5\n" * 20,
    "molecules.csv": "smiles,active\n" + "CCO,1\nCCN,0\n" * 20,
    "rows.txt": "some words\n" * 50,
    "bad.smi": "CCO\nC1CC\n" * 20,
    "ragged.csv": "id,text\n1,some words\n2,Hello, world\n",
    "empty.txt": "",
    "binary.txt": bytes(range(256)),
    "cut.txt.gz": gzip.compress(b"words " * 100)[:-10],
    "notes.doc": "x",
    "words.txt.bz2": "x",
    "mac.txt": "one\rtwo\r",
    "quotes.tsv": 'text\ty\n" so\t1\nplain\t0\nthe end "\t1\n',
    "list.json": "[1, 2]",
    "unusual.csv": "a,b\n1,2\n",
    "typo.yaml": "extends: quickstart-text\nmasking: {mask_porb: 0.3}\n",
    "missing-section.yaml": "command: pretrain\nobjective: exlm\n",
    "no-command.yaml": "objective: exlm\n",
    "not-a-recipe.yaml": "- a\n",
    "nul.yaml": 'extends: quickstart-text\ndata: {train: "a\\0b"}',
    "new.csv": "mol,active\nCCO,1\n",
    "a-no-answer.json": "{}",
    "rows.parquet": "rows",
    "file": "",
    "data/bace.csv": "smiles,Class\nCCO,1\n",
    "run/metrics.jsonl": '{"kind": "valid", "step": 0, "loss": 3.0}\n',
    "empty/metrics.jsonl": "",
    "damaged/metrics.jsonl": '{"kind": "train", "step": 0, "loss": 3.0}\n{"step": -1}\n',
    "full/run.json": "{}",
}


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
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (folder / "linked.csv").symlink_to("new.csv")
    for task in ("rte", "mrpc"):
        write_glue(folder / "data", task)
    write(folder / "data", "train-v2.0.json", "Moss")
    write(folder / "data", "dev-v2.0.json", "Tea")
    (folder / "folder.csv").mkdir()
    (folder / "unfinished").mkdir()
    update_run_json(folder / "unfinished", {"command": "finetune"})
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
