"""Python API of trained runs: predict rows, embed rows, fill masks.

Axes: R rows, n columns of numbers.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

import numpy as np
from numpy.typing import NDArray
from torch import nn

from exlm_cli.api.frames import GivenRows, check_rows, read_given
from exlm_cli.config.tasks import GlueTaskConfig, SquadTaskConfig
from exlm_cli.cost.meter import num_parameters
from exlm_cli.dag.build import dags_of_inputs
from exlm_cli.dag.inspection import Inspection, inspect
from exlm_cli.dag.read import MaskedText, read_masked, read_masked_rows
from exlm_cli.dag.search import Length
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.errors import CheckpointError, ConfigError, DataError
from exlm_cli.export.given import local_run
from exlm_cli.fill.score import score_text, score_texts
from exlm_cli.fill.words import MaskWords
from exlm_cli.finetune.cells.model import Finetuned, load_finetuned
from exlm_cli.finetune.evaluation.calibration import DEFAULT_LEVEL
from exlm_cli.finetune.features import FeatureStore, with_descriptors
from exlm_cli.finetune.prediction.embed import RowEncoder, Vectors, embed_rows, finetuned_encoder, pretrained_encoder
from exlm_cli.finetune.prediction.explain import explain_molecules
from exlm_cli.finetune.prediction.predict import check_options, predict_rows, require_molecules
from exlm_cli.finetune.results import FinetunedRun
from exlm_cli.finetune.scores import Predictor
from exlm_cli.format import format_parameters, format_percent
from exlm_cli.progress import Progress, SilentProgress
from exlm_cli.run_dir import run_kind
from exlm_cli.tasks.base import FloatArray, NewRows, TrainedTask
from exlm_cli.tasks.registry import columns_of, num_texts
from exlm_cli.tasks.rows.table import rows_of_list
from exlm_cli.tasks.rows.task import ScoredRows
from exlm_cli.tasks.squad.files import questions_of_pairs
from exlm_cli.tasks.squad.task import new_questions
from exlm_cli.tasks.user_table import new_rows
from exlm_cli.train.pretrained import Pretrained, load_pretrained

if TYPE_CHECKING:
    from pandas import DataFrame

Texts = list[str] | tuple[str, ...] | NDArray[Any]
"""Texts in a list, an array or a Series, which has no types of its own."""
MANY_MASKS = 32
"""The search for fillings of more masks takes seconds."""
_TEXT_COLUMNS = ("predicted_class", "answer", "answers", "in_split", "problem")
"""Columns of predictions that are no numbers."""


class Filled(Inspection):
    """The DAG of a text and its fillings, which a notebook shows as the drawn graph."""

    def __repr__(self) -> str:
        fillings = self.n_best.fillings
        best = ", ".join(f"{format_percent(self.share(one))} {one.text}" for one in fillings[:3])
        more = f"; {len(fillings) - 3} more" if len(fillings) > 3 else ""
        return f"<fillings of {self.dag.text!r}: {best}{more}>"

    def _repr_svg_(self) -> str:
        from exlm_cli.dag.figures import render_graph

        return render_graph(self, ["svg"])["svg"].decode()


class FilledRows(list[Filled | None]):
    """What fills each text of a list, in order; None for a text that cannot be read.

    Attributes:
        problems: Why a text cannot be read; empty where it can.
    """

    def __init__(self, rows: Iterable[Filled | None], problems: tuple[str, ...]) -> None:
        super().__init__(rows)
        self.problems = problems


@dataclass(frozen=True)
class Scores:
    """Scores of R texts.

    Attributes:
        log_probs: (R,) float64, nats, as `Run.score` has them of one; NaN where a text cannot be scored.
        problems: R strings, why it cannot; empty where it can.
    """

    log_probs: FloatArray
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Explanations:
    """What the atoms of R molecules add to their predictions.

    Attributes:
        names: C labels, classes or columns of values.
        smiles: R SMILES that the model read; those given where it cannot.
        predicted: (R, C) float64, as `predict` gives them: values in the units of the training file, or probabilities.
            NaN for a row that cannot be read.
        changes: R arrays (A, C) float64: what each atom adds to the prediction, in the order in which the SMILES names
            them and in the same units: the mean of what the prediction loses when the atom alone is hidden, and of what
            it gains by the atom when all others are. NaN for atoms beyond the sequence length; no rows for a molecule
            that cannot be read.
        problems: R strings, why a row cannot be read; empty where it can.
        notes: On rows that were cut, or that have tokens outside the vocabulary.
    """

    names: tuple[str, ...]
    smiles: tuple[str, ...]
    predicted: FloatArray
    changes: tuple[FloatArray, ...]
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

    def __repr__(self) -> str:
        """Say which run it is, of what kind, and what it reads."""
        size = format_parameters(num_parameters(self.model))
        return f"<exlm {self.kind} run {self.path}: reads {self.encoder.kind}, {size} parameters>"

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of a fine-tuned run; none of a pre-trained one."""
        return () if isinstance(self._loaded, Pretrained) else self._loaded.results.seeds

    @property
    def model(self) -> nn.Module:
        """The model in evaluation mode; for a fine-tuned run, that of the seed with the best validation score."""
        return self._loaded.model if isinstance(self._loaded, Pretrained) else self.encoder.runner.model

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the model was trained with."""
        return self._loaded.tokenizer

    @property
    def pretrained(self) -> Pretrained:
        """The model, its recipe and its checkpoint.

        Raises:
            CheckpointError: The run is fine-tuned: it has no language model head any more.
        """
        if isinstance(self._loaded, Finetuned):
            raise CheckpointError(
                f"{self.path} is a fine-tuned run, which fills no masks",
                f"load the pre-trained run it began with: {self._loaded.results.init.checkpoint}",
            )
        return self._loaded

    @property
    def finished(self) -> FinetunedRun:
        """Scores and verdict of a fine-tuned run: `finished.scores.reported`, `finished.verdict`.

        Raises:
            CheckpointError: The run is pre-trained.
        """
        return FinetunedRun(self.path.name, self.path, self._finetuned(None).results)

    @cached_property
    def encoder(self) -> RowEncoder:
        """The encoder that makes vectors; for a fine-tuned run, that of the seed with the best validation score."""
        loaded = self._loaded
        return pretrained_encoder(loaded) if isinstance(loaded, Pretrained) else finetuned_encoder(loaded)

    def predict(
        self,
        rows: Any,
        *,
        columns: Mapping[str, Sequence[float]] | None = None,
        predictor: Predictor | None = None,
        seeds: Sequence[int] | None = None,
        interval_level: float = DEFAULT_LEVEL,
    ) -> "DataFrame":
        """Predict rows with a fine-tuned run.

        Args:
            rows: SMILES or texts in a list, array, Series or DataFrame, or one string; pairs of texts for a task of
                pairs, and of question and paragraph for SQuAD. Of a DataFrame the columns of the training are read.
            columns: Numbers of every row for each of `task.descriptor_columns`, by name; NaN where one is missing.
                None: those of a DataFrame.
            predictor: `model`, its `baseline` that is the best in validation, or `both`, their mean; None: the best on
                the run's validation rows.
            seeds: Seeds of the run whose mean is predicted, without calibrated columns if not all; None: all.
            interval_level: Share of the true values that the intervals of a regression should hold.

        Returns:
            The table that `exlm predict` writes: a line for each row, in order, whose numbers are float64, NaN for a
            row that cannot be read; `problem` says why. A Series or DataFrame keeps its index, and its columns come
            first. `attrs` has `notes`, and what predicted as `predictor`.

        Raises:
            CheckpointError: The run is pre-trained, so it predicts no labels, or a file of it is damaged.
            ConfigError: A level that is not between 0 and 1 or for a run that predicts no values, a predictor that the
                run has not, or seeds that it has not.
            DataError: `rows` is not a list of strings, or of tuples with as many strings as the task needs; or
                `columns` lacks one, has another, or another number of values.
        """
        import pandas as pd

        finetuned = self._finetuned(seeds)
        predictor = check_options(finetuned, predictor, interval_level)
        own = self._given(finetuned, rows, columns)
        given = self._read(finetuned, own)
        found = predict_rows(
            finetuned, given, predictor=predictor, interval_level=interval_level, progress=self._progress
        )
        cells, notes = given.joined(found.columns)
        table = pd.DataFrame(
            {
                name: list(column) if name in _TEXT_COLUMNS else [float(cell or math.nan) for cell in map(str, column)]
                for name, column in cells.items()
            }
        )
        table = own.beside(table)
        table.attrs = {"predictor": predictor, "notes": (*given.notes, *found.encoded.notes, *notes, *found.notes)}
        return table

    def explain(
        self,
        rows: Any,
        *,
        columns: Mapping[str, Sequence[float]] | None = None,
        predictor: Predictor | None = None,
        seeds: Sequence[int] | None = None,
    ) -> Explanations:
        """Hide atoms of molecules, and return how much each adds to the predictions.

        Args:
            rows: SMILES, in any form that `predict` takes.
            columns, predictor, seeds: As for `predict`.

        Raises:
            CheckpointError: The run is pre-trained, so it predicts no labels.
            ConfigError: It reads text, or has not these seeds or this predictor.
            DataError: `rows` is neither a string nor a list of strings, or `columns` are not those of the run.
        """
        finetuned = self._finetuned(seeds)
        require_molecules(finetuned)
        predictor = check_options(finetuned, predictor, DEFAULT_LEVEL)
        own = self._given(finetuned, rows, columns)
        given = self._read(finetuned, own)
        problems = given.problems or ("",) * len(own.texts)
        encoded = given.encode(finetuned.tokenizer, finetuned.sequence_length)
        encoded = with_descriptors(encoded, finetuned.recipe.task, FeatureStore(), self._progress)
        assert isinstance(encoded, ScoredRows), "rows of molecules are"
        read = [smiles for (smiles,) in encoded.texts]
        found = explain_molecules(finetuned, encoded, read, predictor, self._progress)
        names = finetuned.results.output_names
        smiles, changes = [text for (text,) in own.texts], [np.zeros((0, len(names)))] * len(problems)
        predicted_RC = np.full((len(problems), len(names)), np.nan)
        for row, molecule in zip(given.readable.tolist(), found, strict=True):
            smiles[row], predicted_RC[row], changes[row] = molecule.smiles, molecule.predicted, molecule.changes
        notes = (*given.notes, *encoded.notes)
        return Explanations(names, tuple(smiles), predicted_RC, tuple(changes), problems, notes)

    def _finetuned(self, seeds: Sequence[int] | None) -> Finetuned:
        """Return the fine-tuned models, of all seeds or some.

        Raises:
            CheckpointError: The run is pre-trained.
            ConfigError: It has not these seeds.
        """
        if isinstance(self._loaded, Pretrained):
            raise CheckpointError(
                f"{self.path} is a pre-trained run, which predicts no labels",
                "`fill` predicts masked tokens; fine-tune the run for labels",
            )
        return self._loaded if seeds is None else self._loaded.only(seeds)

    def _given(self, finetuned: Finetuned, rows: Any, columns: Mapping[str, Sequence[float]] | None) -> GivenRows:
        config = finetuned.recipe.task
        return read_given(
            rows,
            columns,
            kind=finetuned.results.input_kind,
            usual=columns_of(config),
            number_columns=config.number_columns,
            num_texts=num_texts(config),
        )

    def _read(self, finetuned: Finetuned, given: GivenRows) -> NewRows:
        """Return rows as those of a file, without its columns."""
        config, results = finetuned.recipe.task, finetuned.results
        if isinstance(config, SquadTaskConfig):
            questions, problems = questions_of_pairs((question, paragraph) for question, paragraph in given.texts)
            return replace(new_questions(config, questions), problems=problems)
        if isinstance(config, GlueTaskConfig):
            from exlm_cli.tasks.glue import GLUE_TASKS, new_texts

            info = GLUE_TASKS[config.name.removeprefix("glue/")]
            return replace(new_texts(info, given.texts), problems=("",) * len(given.texts))
        found = rows_of_list(given.texts, results.input_kind, self._progress, reads_parents=config.reads_parents)
        task = TrainedTask(config, results.input_kind, results.loss, results.output_names)
        unknown = np.full((len(found.rows), 1), np.nan)
        numbers = None if given.numbers is None else given.numbers[found.rows]
        return new_rows(found, task, unknown, {}, found.notes, numbers)

    @overload
    def embed(self, rows: str | Sequence[str]) -> Vectors: ...

    @overload
    def embed(self, rows: str | Sequence[str], *, seeds: Sequence[int]) -> list[Vectors]: ...

    def embed(self, rows: str | Sequence[str], *, seeds: Sequence[int] | None = None) -> Vectors | list[Vectors]:
        """Return two vectors of each row, from the encoder without its head.

        Args:
            rows: SMILES or texts; one string is one row.
            seeds: Seeds of a fine-tuned run, for a list with the vectors of each, whose axes have nothing in common;
                None: the vectors of the seed with the best validation score.

        Raises:
            DataError: `rows` is neither a string nor a list of strings.
            ConfigError: The run has not these seeds; a pre-trained one has none to choose from.
        """
        encoders = [self.encoder] if seeds is None else self._encoders(seeds)
        found = rows_of_list(
            check_rows(rows), self.encoder.kind, self._progress, reads_parents=self.encoder.reads_parents
        )
        vectors = [embed_rows(encoder, found, self._progress) for encoder in encoders]
        return vectors[0] if seeds is None else vectors

    def _encoders(self, seeds: Sequence[int]) -> list[RowEncoder]:
        """Return the encoders of some seeds.

        Raises:
            ConfigError: The run has not these.
        """
        if isinstance(self._loaded, Pretrained):
            raise ConfigError(f"`seeds={seeds}`: {self.path} is a pre-trained run, of one seed", "leave it out")
        finetuned = self._loaded.only(seeds)
        return [finetuned_encoder(finetuned, seed) for seed in seeds]

    @overload
    def fill(self, text: str, *, num_fillings: int = ..., num_top: int = ..., length: Length = ...) -> Filled: ...

    @overload
    def fill(self, text: Texts, *, num_fillings: int = ..., num_top: int = ..., length: Length = ...) -> FilledRows: ...

    def fill(
        self,
        text: str | Texts,
        *,
        num_fillings: int = 10,
        num_top: int = 3,
        length: Length = "exact",
    ) -> Filled | FilledRows:
        """Fill the masks of a text, or of each of several, with a pre-trained run, jointly.

        Args:
            text: Running text or SMILES, or several in a list, array or Series; each "[MASK]" hides one token.
            num_fillings: Most probable fillings to find.
            num_top: Words of each node.
            length: `exact`: one token for each mask; `any`: also none or several.

        Returns:
            The DAG with its fillings, best first: `n_best.fillings[0].text`, and `share(filling)` for probabilities.
            For several texts a list of these, with None for a text that cannot be read; its `problems` say why. The DAG
            of an MLM is a chain, whose masks are filled independently.

        Raises:
            CheckpointError: The run is fine-tuned: it has no language model head any more.
            ConfigError: A number below 1, or another `length`; `any` for a model without a transition head.
            DataError: The text is empty, has no [MASK] or is too long, or the model is a Repeated MLM.
        """
        pretrained = self.pretrained
        if num_fillings < 1 or num_top < 1:
            raise ConfigError(
                f"`num_fillings={num_fillings}`, `num_top={num_top}`: accepted: 1 or more", "for example 10 and 3"
            )
        if length not in get_args(Length):
            raise ConfigError(
                f"`length={length}` is not one of {', '.join(get_args(Length))}", "leave it out for `exact`"
            )
        if length == "any" and pretrained.model.transition is None:
            raise ConfigError(
                f"`length=any` needs `alignment: dag` or `sparse_dag`; the model of {self.path} has one token a mask",
                "leave it out for `exact`",
            )
        settings: dict[str, Any] = {"num_top": num_top, "num_fillings": num_fillings, "length": length}
        if isinstance(text, str):
            (found,) = self._inspect([read_masked(pretrained, text)], settings, pretrained)
            return found
        masked, problems = read_masked_rows(pretrained, [one for (one,) in check_rows(text)])
        filled = iter([*self._inspect([one for one in masked if one is not None], settings, pretrained)])
        return FilledRows((None if one is None else next(filled) for one in masked), problems)

    @overload
    def score(self, text: str, filling: str | None = None) -> float: ...

    @overload
    def score(self, text: Texts, filling: Texts | None = None) -> Scores: ...

    def score(self, text: str | Texts, filling: str | Texts | None = None) -> float | Scores:
        """Score fillings of masks, or texts without masks, with a pre-trained run.

        Args:
            text: Running text or SMILES, or several in a list, array or Series.
            filling: The words of the masks, parted by bars, like `two|dogs`, as `exlm fill` writes them; for several
                texts one each. None: the texts have no masks.

        Returns:
            Log-probability, nats: of all masks together, given as many tokens as masks; of a text without masks its
            pseudo-log-likelihood, the sum over its tokens, each masked in turn, for molecules of the canonical SMILES.

        Raises:
            CheckpointError: The run is fine-tuned.
            DataError: One text cannot be scored; of several texts, such rows have a problem. Or there are not as many
                fillings as texts.
        """
        if isinstance(text, str):
            if filling is not None and not isinstance(filling, str):
                raise DataError(f"one text, and `filling` is {type(filling).__name__}", "give one string for one text")
            return score_text(self.pretrained, text, filling, MaskWords(self.tokenizer)).log_prob
        texts = [one for (one,) in check_rows(text)]
        fillings = [None] * len(texts) if filling is None else [one for (one,) in check_rows(filling)]
        if len(fillings) != len(texts):
            raise DataError(f"{len(texts)} texts and {len(fillings)} fillings", "give a filling for each text")
        found = list(score_texts(self.pretrained, texts, fillings, self._progress))
        for note in dict.fromkeys(note for one in found for note in one.notes):
            self._progress.message(note)
        return Scores(np.array([one.log_prob for one in found]), tuple(one.problem for one in found))

    def _inspect(
        self, inputs: Sequence[MaskedText], settings: Mapping[str, Any], pretrained: Pretrained
    ) -> Iterator[Filled]:
        for note in dict.fromkeys(note for one in inputs for note in one.notes):
            self._progress.message(note)
        with self._progress.bar("fillings", len(inputs)) as bar:
            dags = dags_of_inputs(pretrained.model, pretrained.tokenizer, pretrained.recipe, inputs)
            for number, dag in enumerate(dags, start=1):
                if dag.num_masks > MANY_MASKS:
                    searched = f"searching for the best joint fillings of {dag.num_masks} masks, up to a limit of work"
                    self._progress.message(searched)
                yield Filled(**vars(inspect(dag, **settings, checkpoint=pretrained.name)))
                bar.update(number)


def load(run: str | Path, *, device: str = "auto", progress: Progress | None = None) -> Run:
    """Read the model of a pre-trained or fine-tuned run.

    Args:
        run: Run directory, one of the `checkpoints/step-N` of a pre-trained run, `hub:OWNER/NAME[@REVISION]`, a model
            of the package, `bundled:text` or `bundled:smiles`, or a masked LM or encoder of transformers,
            `hf:FOLDER-OR-NAME`.
        device: `auto` (CUDA where there is a device), `cpu` or `cuda`.
        progress: Reports the work; None: silent.

    Raises:
        CheckpointError: It is not a run, not finished, or damaged, or its files are not those of its checkpoint.
        TokenizerError: Its tokenizer cannot be read.
        ConfigError: There is no such device.
    """
    progress = progress or SilentProgress()
    path = local_run(Path(run), progress)
    if run_kind(path) == "finetune":
        return Run(path, load_finetuned(path, device=device), progress)
    return Run(path, load_pretrained(path, device=device, progress=progress), progress)
