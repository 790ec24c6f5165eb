"""`exlm fill`: the masks of one text or SMILES, or of every row of a file."""

import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exlm_cli.cli.options import (
    CheckpointOption,
    JsonOption,
    KindOption,
    ScoringDeviceOption,
    SmilesColumnOption,
    TextColumnOption,
    choose_columns,
    refuse_together,
    refuse_without,
)
from exlm_cli.errors import ConfigError
from exlm_cli.paths import expand_path

if TYPE_CHECKING:
    from exlm_cli.cli.options import Device
    from exlm_cli.fill.engine import FillSettings
    from exlm_cli.fill.file import Predict
    from exlm_cli.progress import Progress
    from exlm_cli.train.pretrained import Pretrained

InputArgument = Annotated[
    str,
    typer.Argument(metavar="TEXT|FILE", help="Text or SMILES in which each [MASK] hides a token, or a file of such."),
]
FillingsOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="FILE",
        parser=expand_path,
        help="The CSV; default for a file: report/fillings-<FILE> of the run.",
    ),
]
TopOption = Annotated[
    int | None, typer.Option("--top", min=1, max=1000, metavar="N", help="Fillings of each row; default: 10.")
]
PassesOption = Annotated[
    int | None,
    typer.Option(
        "--passes",
        min=1,
        metavar="P",
        help="Fill the surest masks, read the text again, P times; default: 1, all masks jointly.",
    ),
]
SampleOption = Annotated[
    int | None,
    typer.Option("--sample", min=1, max=100_000, metavar="N", help="Draw N fillings of each row, each another one."),
]
TemperatureOption = Annotated[
    float | None, typer.Option("--temperature", metavar="X", help="Of the draws; default: 1, below it surer tokens.")
]
DrawSeedOption = Annotated[int | None, typer.Option("--seed", min=0, metavar="S", help="Of the draws; default: 0.")]
RepeatsOption = Annotated[bool, typer.Option("--repeats", help="Let draws come twice.")]
TargetsOption = Annotated[
    str | None,
    typer.Option(
        "--targets",
        metavar="WORDS",
        help="What may stand at masks: a column of FILE with a list for each row, a file of words, or A,B.",
    ),
]
MaxTokensOption = Annotated[
    int | None, typer.Option("--max-tokens", min=2, metavar="N", help="Try one to N tokens at each mask.")
]
NormalisedOption = Annotated[
    bool,
    typer.Option("--length-normalised", help="Compare fillings of different lengths by log-probability per token."),
]
SpellingsOption = Annotated[
    int | None,
    typer.Option(
        "--spellings", min=2, max=64, metavar="N", help="Ask in N spellings of an unfinished molecule, for the mean."
    ),
]
KeepInvalidOption = Annotated[
    bool, typer.Option("--keep-invalid", help="List fillings that are no molecules too, with the problem.")
]
PredictOption = Annotated[
    Path | None,
    typer.Option(
        "--predict", metavar="RUN", parser=expand_path, help="Fine-tuned run that predicts a property of each molecule."
    ),
]
ScoreOption = Annotated[
    bool,
    typer.Option("--score", help="Score the column `filling` of each row, or texts without masks, instead of filling."),
]
_OF_MOLECULES = ("--spellings", "--keep-invalid", "--predict")


def fill(
    given: InputArgument,
    checkpoint: CheckpointOption = None,
    out: FillingsOption = None,
    top: TopOption = None,
    passes: PassesOption = None,
    sample: SampleOption = None,
    temperature: TemperatureOption = None,
    seed: DrawSeedOption = None,
    repeats: RepeatsOption = False,
    targets: TargetsOption = None,
    max_tokens: MaxTokensOption = None,
    length_normalised: NormalisedOption = False,
    spellings: SpellingsOption = None,
    keep_invalid: KeepInvalidOption = False,
    predict: PredictOption = None,
    score: ScoreOption = False,
    kind: KindOption = None,
    smiles_column: SmilesColumnOption = None,
    text_column: TextColumnOption = None,
    device: ScoringDeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Fill the masks of a text, or of each row of a file, jointly.

    A file is a CSV, TSV or Parquet, also .gz, or has one text or SMILES a line. The result is a CSV with the file's own
    columns and a line for each filling, best first. `probability` is that of all masks together, among all fillings
    with one token for each mask; `probability_alone` is the product of those of its tokens, each mask on its own.
    `proven` says that no filling that is missing is more probable. A row that cannot be filled has a `problem`.

    With `--score`, each row has its log-probability in nats: of the words in its column `filling`, like `two|dogs`; or
    of a text without masks, each token masked in turn. docs/filling.md explains more.
    """
    asked: dict[str, Any] = {
        "--top": top,
        "--passes": passes,
        "--sample": sample,
        "--temperature": temperature,
        "--seed": seed,
        "--repeats": repeats or None,
        "--targets": targets,
        "--max-tokens": max_tokens,
        "--length-normalised": length_normalised or None,
        "--spellings": spellings,
        "--keep-invalid": keep_invalid or None,
        "--predict": predict,
    }
    file = Path(given) if os.path.isfile(given) else None  # noqa: PTH113 - False also for a text that is too long
    _check_asked(asked | ({"--out": out} if score and file is None else {}), "--score" if score else None)
    from exlm_cli.cli import console
    from exlm_cli.cli.masked import choose_run, kind_of_file, require_kind, require_own_kind
    from exlm_cli.cli.reports import emit_predictions

    columns = {"smiles": smiles_column, "text": text_column}
    wanted = require_kind(given, checkpoint, kind) if file is None else kind_of_file(file, checkpoint, kind, **columns)
    progress = console.open_progress()
    path = choose_run(checkpoint, wanted, progress)
    from exlm_cli.api.run import load
    from exlm_cli.bundled_models import report_folder
    from exlm_cli.fill.file import fill_file, score_file

    run = load(path, device=device, progress=progress)
    require_own_kind(kind, run.encoder.kind, checkpoint)
    if run.encoder.kind == "text":
        refuse_together("a model of text", {name: asked[name] for name in _OF_MOLECULES})
    if file is None and score:
        result = {"pseudo_log_likelihood": run.score(given)}
        return console.emit_json(result) if as_json else console.emit_pairs(result)
    settings = _settings(asked)
    predictor = None if predict is None else _predictor_of(predict, device, progress)
    if file is None:
        return _fill_text(run.pretrained, given, out, settings, targets, predictor, progress, as_json=as_json)
    answer = score_file if score else partial(fill_file, settings=settings, targets=targets, predict=predictor)
    names = choose_columns(run.encoder.kind, **columns)
    summary = answer(run.pretrained, file, out, folder=report_folder(path), columns=names, progress=progress)
    emit_predictions(summary, as_json=as_json)


def _settings(asked: Mapping[str, Any]) -> "FillSettings":
    """Return how masks are filled, by the options that were given."""
    from exlm_cli.fill.engine import FillSettings

    return FillSettings(
        top=asked["--top"] or 10,
        passes=asked["--passes"] or 1,
        samples=asked["--sample"] or 0,
        temperature=asked["--temperature"] or 1.0,
        seed=asked["--seed"] or 0,
        has_repeats=bool(asked["--repeats"]),
        max_tokens=asked["--max-tokens"] or 1,
        is_length_normalised=bool(asked["--length-normalised"]),
        spellings=asked["--spellings"] or 1,
        keeps_invalid=bool(asked["--keep-invalid"]),
    )


def _predictor_of(run: Path, device: "Device", progress: "Progress") -> "Predict":
    """Return what predicts molecules with a fine-tuned run.

    Raises:
        CheckpointError, ConfigError: It is no such run, or reads text.
    """
    from exlm_cli.api.run import load

    loaded = load(run, device=device, progress=progress)
    if loaded.encoder.kind != "smiles":
        raise ConfigError(f"`--predict {run}`: the run reads text", "give a run that was fine-tuned on molecules")

    def predict(molecules: Sequence[str]) -> dict[str, list[object]]:
        table = loaded.predict(molecules)
        return {str(name): table[name].tolist() for name in table.columns if name != "problem"}

    return predict


def _check_asked(options: Mapping[str, object], score: str | None) -> None:
    """Refuse options that do nothing together.

    Raises:
        ConfigError: Such are given.
    """
    if score is not None:
        refuse_together(score, options)
    draws = {name: options[name] for name in ("--temperature", "--seed", "--repeats")}
    refuse_without("`--sample N`", options["--sample"], draws)
    refuse_without("`--max-tokens N`", options["--max-tokens"], {"--length-normalised": options["--length-normalised"]})
    if options["--sample"] is not None:
        refuse_together("--sample", {name: options[name] for name in ("--top", "--targets", "--max-tokens")})
    if options["--spellings"] is not None:
        refuse_together(
            "--spellings", {name: options[name] for name in ("--passes", "--sample", "--targets", "--max-tokens")}
        )
    if options["--passes"] not in (None, 1):
        refuse_together("--passes", {"--targets": options["--targets"]})
    temperature = options["--temperature"]
    if isinstance(temperature, float) and not 0 < temperature < math.inf:
        raise ConfigError(f"`--temperature {temperature:g}`: accepted: above 0", "give 1 for the model's own draws")


def _fill_text(
    pretrained: "Pretrained",
    text: str,
    out: Path | None,
    settings: "FillSettings",
    targets: str | None,
    predict: "Predict | None",
    progress: "Progress",
    *,
    as_json: bool,
) -> None:
    """Print the fillings of one text, and write them where that is asked for."""
    from exlm_cli.cli import console
    from exlm_cli.fill.file import describe_way, fill_one, fillings_table

    row, lines, files = fill_one(pretrained, text, out, settings=settings, targets=targets, predict=predict)
    for note in row.notes:
        progress.message(note)
    if as_json:
        result = {"checkpoint": pretrained.name, "way": describe_way(settings), "fillings": lines}
        return console.emit_json({**result, "files": files})
    console.emit_renderable(fillings_table(row, lines, settings, text))
    console.emit_files(files)
