"""What an export takes from a run: model, tokenizer, labels, and the outputs that the exported model must reproduce.

Axes: L tokens, V vocabulary, C outputs.
"""

import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.tasks import SquadTaskConfig
from exlm_cli.dag.build import dag_of_tokens
from exlm_cli.dag.graph import token_marginals
from exlm_cli.data.batch import batch_from_masked_ids
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.errors import ConfigError
from exlm_cli.finetune.model import Finetuned
from exlm_cli.finetune.results import RunResults, best_cell_folder
from exlm_cli.finetune.scores import read_scores
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.model.heads import TaskModel
from exlm_cli.run_dir import METRICS_FILE, read_metrics, run_directory
from exlm_cli.tasks.glue import GLUE_TASKS
from exlm_cli.tasks.rows.task import encode_texts
from exlm_cli.train.checkpoint import best_paths
from exlm_cli.train.pretrained import Pretrained

TEXTS = {
    "text": ("It was a quiet day, and everyone felt good.", "Zoë asked:  «why?» 3.14 times"),
    "smiles": ("CC(=O)Oc1ccccc1C(=O)O", "C[N+](C)(C)C[C@@H](O)CC([O-])=O", "N#Cc1cc(Br)ccc1Cl"),
}
MASKED_TEXTS = {"text": "It was a [MASK] day.", "smiles": "CC(=O)[MASK]c1ccccc1"}
"""Texts that both tokenizers must read alike; the model runs on their tokens."""
RANDOM_LENGTHS = (128, 37)
"""Tokens of further sequences, drawn from the whole vocabulary."""


@dataclass(frozen=True)
class Source:
    """A model of a run, on the CPU in evaluation mode.

    Attributes:
        run: Run directory.
        recipe: Recipe of pre-training.
        sequence_length: Tokens of the longest sequence it was trained on, [CLS] and [SEP] included.
        weights: Folders of the checkpoints that a reader of the run needs.
        scores: Scores by name, as the model card shows them; `scores_are` says where they were measured.
        results: Results of a fine-tuning run; None for a pre-trained one.
        seed: Seed of a fine-tuning run with the best validation score; None for a pre-trained one.
        has_canonical_smiles: Whether it reads RDKit's canonical SMILES.
        reads_parents: Whether it reads the parents of molecules instead of salts.
        max_answer_tokens: Tokens of the longest answer of SQuAD; None: another task.
        table: The user's file that it was fine-tuned on; None: the task names its data.
    """

    run: Path
    recipe: PretrainRecipe
    tokenizer: Tokenizer
    model: ExlmModel | TaskModel
    sequence_length: int
    num_steps: int
    num_tokens: int
    scores: dict[str, float]
    scores_are: str
    weights: tuple[Path, ...] = ()
    results: RunResults | None = None
    seed: int | None = None
    has_canonical_smiles: bool = False
    reads_parents: bool = False
    max_answer_tokens: int | None = None
    table: str | None = None

    @property
    def class_name(self) -> str:
        """The class of transformers that holds the model."""
        if self.results is None:
            return "EsmForMaskedLM"
        return "EsmForTokenClassification" if self.results.loss == "span" else "EsmForSequenceClassification"

    @property
    def is_masked_exlm(self) -> bool:
        """Whether the model's [MASK]s expand into states, which only remote code can do."""
        return self.results is None and self.recipe.objective == "exlm"

    @property
    def predicts_masks(self) -> bool:
        """Whether `class_name` predicts [MASK]s."""
        return self.results is None and self.recipe.objective == "mlm"

    @property
    def reads_pairs(self) -> bool:
        """Whether a row is a pair of texts, as in some GLUE tasks; SQuAD cuts its pairs into windows."""
        info = None if self.results is None else GLUE_TASKS.get(self.results.task.removeprefix("glue/"))
        return info is not None and len(info.layouts[0].texts) == 2

    def label_config(self) -> dict[str, Any]:
        """Return the entries of `config.json` that name the outputs."""
        if self.results is None:
            return {}
        names = dict(enumerate(self.results.output_names))
        kinds = {
            "binary": "multi_label_classification",
            "classes": "single_label_classification",
            "regression": "regression",
        }
        kind = kinds.get(self.results.loss)
        labels = {"id2label": names, "label2id": {name: index for index, name in names.items()}}
        return labels if kind is None else {**labels, "problem_type": kind}

    def texts(self) -> list[tuple[str, ...]]:
        """Return rows of one or two texts that the tokenizer of the exported folder must read as ours does.

        Pairs include one that is too long.
        """
        masked = [(MASKED_TEXTS[self.recipe.data.kind],)] if self.results is None else []
        return [*self._unmasked_texts(), *masked]

    def _unmasked_texts(self) -> list[tuple[str, ...]]:
        texts = TEXTS[self.recipe.data.kind]
        if not self.reads_pairs:
            return [(text,) for text in texts]
        long = " ".join([texts[0]] * self.sequence_length)
        return [texts, (long, long)]

    def encode(self, *texts: str) -> list[int]:
        """Return the tokens of a row of one or two texts as the run reads them, cut to its longest sequence.

        A pre-trained model reads one text with its [MASK]s.
        """
        tokenizer = self.tokenizer
        if self.results is not None:
            return [int(token) for token in encode_texts([texts], tokenizer, self.sequence_length).token_ids[0]]
        (text,) = texts
        return [tokenizer.cls_id, *tokenizer.encode_with_masks(text)[: self.sequence_length - 2], tokenizer.sep_id]

    def examples(self) -> dict[str, list[list[int]]]:
        """Return token ids by transformers class; the class must reproduce the run's outputs for them."""
        unmasked = self._example_ids(is_masked=False)
        if self.results is not None:
            return {self.class_name: unmasked}
        masked = self._example_ids(is_masked=True)
        if self.is_masked_exlm:
            return {self.class_name: unmasked, "AutoModelForMaskedLM": [*masked, unmasked[0]]}
        return {self.class_name: [*unmasked, *masked]}

    def _example_ids(self, *, is_masked: bool) -> list[list[int]]:
        """Return the tokens of texts and of random sequences, none longer than the model was trained on.

        Args:
            is_masked: With [MASK]s, as many as in pre-training.
        """
        rng = np.random.default_rng(0)
        tokenizer, longest = self.tokenizer, self.sequence_length
        ordinary = np.flatnonzero(tokenizer.is_ordinary)
        rows = [(MASKED_TEXTS[self.recipe.data.kind],)] if is_masked else self._unmasked_texts()
        examples = [self.encode(*texts) for texts in rows]
        for length in RANDOM_LENGTHS:
            ids = rng.choice(ordinary, size=min(length, longest) - 2)
            num_masks = max(1, int(self.recipe.masking.mask_ratio * len(ids))) if is_masked else 0
            ids[rng.permutation(len(ids))[:num_masks]] = tokenizer.mask_id
            examples.append([tokenizer.cls_id, *ids.tolist(), tokenizer.sep_id])
        return examples

    @cached_property
    def _exact_model(self) -> ExlmModel | TaskModel:
        return copy.deepcopy(self.model).double()

    def outputs(self, token_ids: list[int], *, exact: bool = False) -> Tensor:
        """Return the (L, V), (C,) or (L, 2) outputs of one sequence, float64; for a regression in the task's units.

        At the [MASK]s of an ExLM they are the log-probabilities of each token given as many tokens as [MASK]s.

        Args:
            exact: Compute in float64, all but log-probabilities at the [MASK]s of an ExLM; else in float32, as the run.
        """
        ids, model, tokenizer = np.array(token_ids), self._exact_model if exact else self.model, self.tokenizer
        with torch.inference_mode():
            if isinstance(model, TaskModel):
                tokens, lengths = torch.from_numpy(ids)[None], torch.tensor([len(ids)])
                hidden = model.encode(tokens, lengths, is_padded=False)
                return model.in_units(model.head(hidden, lengths))[0].double()
            batch = batch_from_masked_ids(
                ids[None],
                mask_id=tokenizer.mask_id,
                pad_id=tokenizer.pad_id,
                num_states_per_mask=model.num_states_per_mask,
                expands_input=model.expands_input,
            )
            head = model.lm_head
            logits_XV = F.linear(head(model.encode(batch)[0]), model.decoder_weight, head.bias).double()
            is_mask_L = torch.from_numpy(ids == tokenizer.mask_id)
            if self.recipe.objective == "mlm" or not is_mask_L.any():
                return logits_XV
            outputs_LV = logits_XV.new_empty(len(ids), tokenizer.vocab_size)
            outputs_LV[~is_mask_L] = logits_XV[batch.token_ids[0] != tokenizer.mask_id]
            assert isinstance(self.model, ExlmModel), "a task model has returned"
            dag = dag_of_tokens(self.model, tokenizer, self.recipe, ids)
            outputs_LV[is_mask_L] = torch.from_numpy(token_marginals(dag)).clamp(min=1e-38).log()
            return outputs_LV


def pretrained_source(pretrained: Pretrained) -> Source:
    """Return the model of a pre-trained checkpoint with its newest validation before it."""
    run = run_directory(pretrained.checkpoint)
    log = run / METRICS_FILE
    rows = [row for row in (read_metrics(log) if log.is_file() else []) if row.get("kind") == "valid"]
    rows = [row for row in rows if row["step"] <= pretrained.step]
    shown = {name: rows[-1].get(name) for name in ("loss", "mask_accuracy", "perplexity")} if rows else {}
    return Source(
        run=run,
        recipe=pretrained.recipe,
        tokenizer=pretrained.tokenizer,
        model=pretrained.model,
        weights=(pretrained.checkpoint,),
        sequence_length=pretrained.recipe.data.sequence_length,
        num_steps=pretrained.step,
        num_tokens=pretrained.num_tokens,
        scores={name: float(value) for name, value in shown.items() if value is not None},
        scores_are=f"on validation sequences, step {rows[-1]['step']:,}" if rows else "",
        has_canonical_smiles=pretrained.recipe.data.has_canonical_smiles,
    )


def finetuned_source(finetuned: Finetuned) -> Source:
    """Return the model of the seed with the best validation score, and its scores.

    Raises:
        ConfigError: The model reads descriptors.
    """
    results, task, seed = finetuned.results, finetuned.recipe.task, finetuned.results.best_seed
    if task.molecule_descriptors or task.number_columns:
        raise ConfigError(
            f"{finetuned.run}: its head reads descriptors, for which the classes of transformers have no input",
            "predict with `exlm predict RUN FILE`, or fine-tune without `task.descriptors` and `descriptor_columns`",
        )
    scores = read_scores(finetuned.run).of_seed(results.scored_split, seed, task.split_seed)
    return Source(
        run=finetuned.run,
        recipe=finetuned.encoder_recipe,
        tokenizer=finetuned.tokenizer,
        model=finetuned.runners[seed].model,
        weights=tuple(best_paths(best_cell_folder(finetuned.run, results, one))[0] for one in results.seeds),
        sequence_length=finetuned.sequence_length,
        num_steps=results.init.steps,
        num_tokens=results.init.tokens,
        scores=scores,
        scores_are=f"on the {results.scored_split} split",
        results=results,
        seed=seed,
        has_canonical_smiles=task.has_canonical_smiles,
        reads_parents=task.reads_parents,
        max_answer_tokens=task.max_answer_tokens if isinstance(task, SquadTaskConfig) else None,
        table=task.files.train,
    )
