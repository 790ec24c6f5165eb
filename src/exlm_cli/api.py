"""Python API of trained runs: predict rows, embed rows, fill masks. Results are NumPy arrays.

Axes: R rows, K seeds, C outputs, D model width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from exlm_cli.bundled_models import local_path
from exlm_cli.config.tasks import GlueTaskConfig, InstalledTask, SquadTaskConfig
from exlm_cli.dag.build import build_dag
from exlm_cli.dag.inspection import Inspection, inspect
from exlm_cli.dag.search import Length
from exlm_cli.errors import CheckpointError, ConfigError, DataError
from exlm_cli.export.hub import SCHEME, fetch_run
from exlm_cli.finetune.calibration import DEFAULT_LEVEL, check_level, error_signs, read_calibration
from exlm_cli.finetune.embed import RowEncoder, Vectors, embed_rows, finetuned_encoder, pretrained_encoder
from exlm_cli.finetune.explain import explain_molecules, require_molecules
from exlm_cli.finetune.model import Finetuned, load_finetuned
from exlm_cli.finetune.training_rows import read_training_rows
from exlm_cli.format import is_unicode
from exlm_cli.progress import Progress, SilentProgress
from exlm_cli.run_dir import run_kind
from exlm_cli.tasks.base import NewRows, TrainedTask
from exlm_cli.tasks.metrics import probabilities_by_seed
from exlm_cli.tasks.rows.encoded import ScoredRows
from exlm_cli.tasks.rows.inputs import rows_of_list
from exlm_cli.tasks.rows.task import new_rows
from exlm_cli.tasks.squad.files import questions_of_pairs
from exlm_cli.tasks.squad.task import ANSWER_QUESTIONS, ScoredQuestions, new_questions
from exlm_cli.train.pretrained import Pretrained, load_pretrained

MANY_MASKS = 32
"""The search for fillings of more masks takes seconds."""


@dataclass(frozen=True)
class Predictions:
    """Predictions of R rows, in their order.

    Attributes:
        names: C labels, classes or columns of values.
        mean: (R, C) float64, means over the seeds: probabilities of labels and classes, or values in the units of the
            training file. NaN for a row that cannot be read.
        by_seed: (K, R, C) float64, those of each seed.
        calibrated: (R, C) float64, probabilities calibrated on the run's validation rows; NaN where these were too
            few, None for values.
        half_width: (R, C) float64, for values: half the width of the interval of `interval_level` around `mean`; NaN
            for a row that cannot be read, or where the run had too few validation rows. None for probabilities.
        problems: R texts, why a row cannot be read; empty where it can.
        notes: Notes on rows that were cut, and on rows with tokens outside the vocabulary or with a doubtful metal.
        answers: For SQuAD, R pieces of the paragraphs, the best answers by the seeds' mean logits; empty for a row that
            cannot be read. `names` are then `has_answer` and `is_right`, and `mean` is the logistic function of the
            margin for both. None for other tasks.
        margin: For SQuAD, (R,) float64, score of the answer minus the score of no answer. None for other tasks.
    """

    names: tuple[str, ...]
    mean: NDArray[np.float64]
    by_seed: NDArray[np.float64]
    calibrated: NDArray[np.float64] | None
    half_width: NDArray[np.float64] | None
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    answers: tuple[str, ...] | None = None
    margin: NDArray[np.float64] | None = None


@dataclass(frozen=True)
class Explanations:
    """What the atoms of R molecules add to their predictions.

    Attributes:
        names: C labels, classes or columns of values.
        smiles: R SMILES that the model read; those given where it cannot.
        predicted: (R, C) float64, means over the seeds: values in the units of the training file, or log-odds of labels
            and classes. NaN for a row that cannot be read.
        changes: R arrays (A, C) float64: what each atom adds to the prediction, in the order in which the SMILES names
            them and in the same units: the mean of what the prediction loses when the atom alone is masked, and of what
            it gains by the atom when all others are. NaN for atoms beyond the sequence length; no rows for a molecule
            that cannot be read.
        problems: R texts, why a row cannot be read; empty where it can.
        notes: As in `Predictions`.
    """

    names: tuple[str, ...]
    smiles: tuple[str, ...]
    predicted: NDArray[np.float64]
    changes: tuple[NDArray[np.float64], ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]


class Run:
    """A trained run in memory, as `load` returns it.

    Attributes:
        path: Its directory, or the checkpoint that was given.
        kind: `pretrain` or `finetune`.
    """

    def __init__(self, path: Path, loaded: Pretrained | Finetuned, progress: Progress) -> None:
        self.path, self._loaded, self._progress = path, loaded, progress
        self.kind: Literal["pretrain", "finetune"] = "pretrain" if isinstance(loaded, Pretrained) else "finetune"

    @cached_property
    def encoder(self) -> RowEncoder:
        """The encoder that makes vectors; for a fine-tuned run, that of the seed with the best validation score."""
        loaded = self._loaded
        return pretrained_encoder(loaded) if isinstance(loaded, Pretrained) else finetuned_encoder(loaded)

    def predict(
        self, rows: Sequence[str] | Sequence[tuple[str, str]], *, interval_level: float = DEFAULT_LEVEL
    ) -> Predictions:
        """Predict rows with a fine-tuned run.

        Args:
            rows: SMILES or texts; pairs of texts for a GLUE task of pairs, and of question and paragraph for SQuAD.
            interval_level: Share of the true values that the intervals of a regression should hold.

        Returns:
            Probabilities or values of every row, for each seed and their mean; for SQuAD also answers.

        Raises:
            CheckpointError: The run is pre-trained, so it predicts no labels, or its calibration.json is damaged.
            ConfigError: A level that is not between 0 and 1 or for a run that predicts no values, or an installed task
                that reads files of its own layout (`exlm predict`).
            DataError: `rows` is not a list of strings, or of tuples with as many strings as the task needs.
        """
        finetuned = self._finetuned()
        results, config = finetuned.results, finetuned.recipe.task
        if isinstance(config, InstalledTask) and (results.loss == "span" or config.layout() is not None):
            raise ConfigError(
                f"{self.path}: {config.name} reads files of its own layout, not rows", "use `exlm predict RUN FILE`"
            )
        check_level(interval_level, results.loss, finetuned.run)
        calibration = read_calibration(finetuned.run)
        given, problems = self._read(finetuned, rows)
        encoded = given.encode(finetuned.tokenizer, finetuned.sequence_length)
        outputs = finetuned.run_seeds(encoded, self._progress)
        names, loss = results.output_names, results.loss
        answers = margin = None
        if isinstance(encoded, ScoredQuestions):
            names, loss = ANSWER_QUESTIONS, "binary"
            by_seed_KNC = np.stack([encoded.answer_probabilities([of_seed]).values for of_seed in outputs])
            mean_NC = encoded.answer_probabilities(outputs).values
            found = encoded.answer(outputs).values()
            by_row = dict(zip(given.readable.tolist(), (answer.text for answer in found), strict=True))
            answers = tuple(by_row.get(row, "") for row in range(len(problems)))
            margin = _in_all_rows(np.array([answer.margin for answer in found]), given, len(problems))
        else:
            by_seed_KNC = probabilities_by_seed(loss, outputs, len(names))
            mean_NC = by_seed_KNC.mean(axis=0)
        mean = _in_all_rows(mean_NC, given, len(problems))
        is_value = loss == "regression"
        if is_value:
            is_molecule = results.input_kind == "smiles"
            known = read_training_rows(finetuned.run) if is_molecule else None
            nearest_N = None if known is None else known.nearest_tanimoto(given.keys, self._progress)
            half_NC = calibration.half_widths(interval_level, error_signs(by_seed_KNC, nearest_N))
        return Predictions(
            names=names,
            mean=mean,
            by_seed=np.stack([_in_all_rows(of_seed, given, len(problems)) for of_seed in by_seed_KNC]),
            calibrated=None if is_value else calibration.calibrate(loss, mean),
            half_width=_in_all_rows(half_NC, given, len(problems)) if is_value else None,
            problems=problems,
            notes=(*given.notes, *encoded.notes),
            answers=answers,
            margin=margin,
        )

    def explain(self, rows: Sequence[str]) -> Explanations:
        """Mask atoms of molecules, and return how much each adds to the predictions.

        Args:
            rows: SMILES.

        Raises:
            CheckpointError: The run is pre-trained, so it predicts no labels.
            ConfigError: It reads text.
            DataError: `rows` is not a list of strings.
        """
        finetuned = self._finetuned()
        require_molecules(finetuned)
        given, problems = self._read(finetuned, rows)
        encoded = given.encode(finetuned.tokenizer, finetuned.sequence_length)
        assert isinstance(encoded, ScoredRows), "rows of molecules are"
        found = explain_molecules(finetuned, encoded, [smiles for (smiles,) in encoded.texts], self._progress)
        names = finetuned.results.output_names
        smiles, changes = list(rows), [np.zeros((0, len(names)))] * len(problems)
        predicted_RC = np.full((len(problems), len(names)), np.nan)
        for row, molecule in zip(given.readable.tolist(), found, strict=True):
            smiles[row], predicted_RC[row], changes[row] = molecule.smiles, molecule.predicted, molecule.changes
        notes = (*given.notes, *encoded.notes)
        return Explanations(names, tuple(smiles), predicted_RC, tuple(changes), problems, notes)

    def _finetuned(self) -> Finetuned:
        """Return the fine-tuned models.

        Raises:
            CheckpointError: The run is pre-trained.
        """
        if isinstance(self._loaded, Pretrained):
            raise CheckpointError(
                f"{self.path} is a pre-trained run, which predicts no labels",
                "`fill` predicts masked tokens; fine-tune the run for labels",
            )
        return self._loaded

    def _read(
        self, finetuned: Finetuned, rows: Sequence[str] | Sequence[tuple[str, str]]
    ) -> tuple[NewRows, tuple[str, ...]]:
        """Return rows as a file's, and why each cannot be read; empty where it can."""
        config, results = finetuned.recipe.task, finetuned.results
        if isinstance(config, SquadTaskConfig):
            pairs = ((question, paragraph) for question, paragraph in check_rows(rows, num_texts=2))
            questions, problems = questions_of_pairs(pairs)
            return new_questions(config, questions), problems
        if isinstance(config, GlueTaskConfig):
            from exlm_cli.tasks.glue import GLUE_TASKS, new_texts

            info = GLUE_TASKS[config.name.removeprefix("glue/")]
            texts = check_rows(rows, num_texts=len(info.layouts[0].texts))
            return new_texts(info, texts), ("",) * len(texts)
        inputs = [text for (text,) in check_rows(rows)]
        found = rows_of_list(inputs, results.input_kind, self._progress, reads_parents=config.reads_parents)
        task = TrainedTask(config, results.input_kind, results.loss, results.output_names)
        unknown = np.full((len(found.rows), 1), np.nan)
        return new_rows(found, task, unknown, {}, found.notes), found.problems

    def embed(self, rows: Sequence[str]) -> Vectors:
        """Return two vectors of each row, from the encoder without its head.

        Args:
            rows: SMILES or texts.

        Raises:
            DataError: `rows` is not a list of strings.
        """
        encoder, texts = self.encoder, [text for (text,) in check_rows(rows)]
        found = rows_of_list(texts, encoder.kind, self._progress, reads_parents=encoder.reads_parents)
        return embed_rows(encoder, found, self._progress)

    def fill(self, text: str, *, num_fillings: int = 10, num_top: int = 3, length: Length = "exact") -> Inspection:
        """Fill the masks of a text with a pre-trained run, jointly.

        Args:
            text: Running text or SMILES; each "[MASK]" hides one token.
            num_fillings: Most probable fillings to find.
            num_top: Words of each node.
            length: `exact`: one token for each mask; `any`: also none or several.

        Returns:
            The DAG with its fillings, best first: `n_best.fillings[0].text`, and `share(filling)` for probabilities.
            The DAG of an MLM is a chain, whose masks are filled independently.

        Raises:
            CheckpointError: The run is fine-tuned: it has no language model head any more.
            ConfigError: A number below 1, or another `length`; `any` for `alignment: independent` with several states.
            DataError: The text is empty, has no [MASK] or is too long, or the model is a Repeated MLM.
        """
        pretrained = self._loaded
        if isinstance(pretrained, Finetuned):
            raise CheckpointError(
                f"{self.path} is a fine-tuned run, which fills no masks",
                f"load the pre-trained run it began with: {pretrained.results.init.checkpoint}",
            )
        if num_fillings < 1 or num_top < 1:
            raise ConfigError(
                f"`num_fillings={num_fillings}`, `num_top={num_top}`: accepted: 1 or more", "for example 10 and 3"
            )
        if length not in get_args(Length):
            raise ConfigError(
                f"`length={length}` is not one of {', '.join(get_args(Length))}", "leave it out for `exact`"
            )
        if length == "any" and pretrained.model.transition is None and pretrained.model.num_states_per_mask > 1:
            raise ConfigError(
                f"`length=any`: the model of {self.path} has `alignment: independent`, and its probabilities here are "
                "those given one token for each mask",
                "leave it out for `exact`",
            )
        if not isinstance(text, str):
            raise DataError(f"`text` is {text!r}, not a string", 'give one text with "[MASK]" in it')
        dag = build_dag(pretrained, text, progress=self._progress)
        if dag.num_masks > MANY_MASKS:
            self._progress.message(
                f"searching for the best joint fillings of {dag.num_masks} masks, up to a limit of work"
            )
        name = pretrained.name
        return inspect(dag, num_top=num_top, num_fillings=num_fillings, length=length, checkpoint=name)


def load(run: str | Path, *, device: str = "auto", progress: Progress | None = None) -> Run:
    """Read the model of a pre-trained or fine-tuned run.

    Args:
        run: Run directory, one of the `checkpoints/step-N` of a pre-trained run, `hub:OWNER/NAME[@REVISION]`, or a
            model of the package, `bundled:text` or `bundled:smiles`.
        device: `auto` (CUDA where there is a device), `cpu` or `cuda`.
        progress: Reports the work; None: silent.

    Raises:
        CheckpointError: It is not a run, not finished, or damaged, or its files are not those of its checkpoint.
        TokenizerError: Its tokenizer cannot be read.
        ConfigError: There is no such device.
    """
    path, progress = local_path(run), progress or SilentProgress()
    if str(path).startswith(SCHEME):
        path = fetch_run(str(path), progress)
    if run_kind(path) == "finetune":
        return Run(path, load_finetuned(path, device=device), progress)
    return Run(path, load_pretrained(path, device=device, progress=progress), progress)


def check_rows(rows: object, num_texts: int = 1) -> list[tuple[str, ...]]:
    """Return rows as tuples of `num_texts` strings.

    Raises:
        DataError: They are something else, or contain a lone surrogate; the error names the row, counted from 1.
    """
    wanted = "a string" if num_texts == 1 else f"a tuple of {num_texts} strings"
    if isinstance(rows, str) or not isinstance(rows, Sequence | np.ndarray):
        raise DataError(f"`rows` is {type(rows).__name__}, not a list", f"give a list, each row {wanted}")
    found = []
    for number, row in enumerate(rows, start=1):
        texts = (row,) if isinstance(row, str) else tuple(row) if isinstance(row, tuple | list) else ()
        if len(texts) != num_texts or not all(isinstance(text, str) for text in texts):
            raise DataError(f"row {number} is {row!r}, not {wanted}", f"give a list, each row {wanted}")
        if not all(map(is_unicode, texts)):
            raise DataError(f"row {number} contains a lone surrogate", "correct the row or leave it out")
        found.append(texts)
    return found


def _in_all_rows(values: NDArray[np.float64], given: NewRows, num_rows: int) -> NDArray[np.float64]:
    """Return values of the readable rows, (N, ...), as those of all rows; NaN for the others."""
    placed = np.full((num_rows, *values.shape[1:]), np.nan)
    placed[given.readable] = values
    return placed
