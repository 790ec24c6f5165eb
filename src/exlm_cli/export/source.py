"""What an export takes from a run: model, tokenizer, labels, and the outputs that the exported model must reproduce.

Axes: B sequences, L tokens, V vocabulary, C outputs, D width.
"""

import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from exlm_cli.bundled_models import LICENCE, bundled_name
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.tasks import SquadTaskConfig
from exlm_cli.data.tokenizer import MASK, Tokenizer
from exlm_cli.errors import ConfigError
from exlm_cli.finetune.cells.model import Finetuned
from exlm_cli.finetune.results import RunResults, best_cell_folder
from exlm_cli.finetune.scores import read_scores
from exlm_cli.model.backbones import FAMILIES
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.model.heads import TaskModel, mean_state
from exlm_cli.run_dir import METRICS_FILE, read_metrics, run_directory
from exlm_cli.tasks.registry import num_texts
from exlm_cli.tasks.rows.task import encode_texts
from exlm_cli.train.checkpoint import best_paths
from exlm_cli.train.pretrained import Pretrained

TEXTS = {
    "text": ("It was a quiet day, and everyone felt good.", "Zoë asked:  «why?» 3.14 times"),
    "smiles": ("CC(=O)Oc1ccccc1C(=O)O", "C[N+](C)(C)C[C@@H](O)CC([O-])=O", "N#Cc1cc(Br)ccc1Cl"),
}
MASKED_TEXTS = {"text": "It was a [MASK] day.", "smiles": "CC(=O)[MASK]c1ccccc1"}
"""Texts that both tokenizers must read alike; the model runs on their tokens."""
_PROBLEM_TYPES = {
    "binary": "multi_label_classification",
    "classes": "single_label_classification",
    "regression": "regression",
}
RANDOM_LENGTHS = (128, 37)
"""Tokens of further sequences, drawn from the whole vocabulary."""


class PlainNetwork(nn.Module):
    """What an exported model computes, with the weights of the run.

    Args:
        model: The model of the run.
        fills_masks: Whether the LM head is a part of it.
    """

    def __init__(self, model: ExlmModel | TaskModel, *, fills_masks: bool) -> None:
        super().__init__()
        self.model, self.fills_masks = model, fills_masks

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs over (B, L) inputs: logits, values in the task's units, or last hidden states.

        A model with an LM head returns its logits, and the last hidden states after them.
        """
        model = self.model
        hidden = model.encoder(input_ids, attention_mask.bool())
        if isinstance(model, TaskModel):
            if model.pooled == "mean":
                hidden = mean_state(hidden, attention_mask.sum(1))[:, None].to(hidden.dtype)
            return (model.in_units(model.head(hidden, attention_mask.sum(1))).to(hidden.dtype),)
        if not self.fills_masks:
            return (hidden,)
        return F.linear(model.lm_head(hidden), model.decoder_weight, model.decoder_bias), hidden


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
        licence: Its licence as the Hub names it, where it is known: that of the package for its models.
        reads_pairs: Whether a row is a pair of texts, as in some GLUE tasks; SQuAD cuts its pairs into windows.
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
    reads_pairs: bool = False
    licence: str | None = None

    @property
    def family(self) -> str:
        """The family of transformers' classes that hold the model: ESM for an encoder of our own."""
        family = self.recipe.model.backbone.family
        return "esm" if family == "own" else family

    @property
    def is_foreign(self) -> bool:
        """Whether the encoder is one of transformers."""
        return self.recipe.model.backbone.family != "own"

    @property
    def class_name(self) -> str:
        """The class of transformers that holds the model."""
        if self.results is None:
            task = "ForMaskedLM" if self.fills_masks else "Model"
        else:
            task = "ForTokenClassification" if self.results.loss == "span" else "ForSequenceClassification"
        return FAMILIES[self.family].classes + task

    @property
    def masked_text(self) -> str:
        """A text with a [MASK], as the tokenizer of the folder calls it."""
        return MASKED_TEXTS[self.recipe.data.kind].replace(MASK, self.tokenizer.special_tokens[3])

    @property
    def fills_masks(self) -> bool:
        """Whether the exported model predicts [MASK]s: pre-trained, and its encoder reads a [MASK] as one token."""
        return self.results is None and not self.recipe.expands_input

    @property
    def has_head(self) -> bool:
        """Whether the exported model has outputs besides its last hidden states."""
        return self.results is not None or self.fills_masks

    @property
    def seed_note(self) -> str | None:
        """What differs from `exlm predict` on a fine-tuned run; None for a pre-trained one."""
        if self.results is None:
            return None
        seeds, which, instead = self.results.seeds, f"seed {self.seed}", []
        if len(seeds) > 1:
            which += f", the best in validation of {', '.join(map(str, seeds))}"
            instead.append("averages the seeds")
        if self.results.loss not in ("regression", "span"):
            instead.append("calibrates probabilities")
        return f"the exported model is {which}" + (f"; `exlm predict` {' and '.join(instead)}" if instead else "")

    @cached_property
    def network(self) -> PlainNetwork:
        """What the exported model must compute, in float32."""
        return PlainNetwork(self.model, fills_masks=self.fills_masks).eval()

    def label_config(self) -> dict[str, Any]:
        """Return the entries of `config.json` that name the outputs."""
        if self.results is None:
            return {}
        names = dict(enumerate(self.results.output_names))
        labels = {"id2label": names, "label2id": {name: index for index, name in names.items()}}
        kind = _PROBLEM_TYPES.get(self.results.loss)
        return labels if kind is None else {**labels, "problem_type": kind}

    def texts(self) -> list[tuple[str, ...]]:
        """Return rows of one or two texts that the tokenizer of the exported folder must read as ours does.

        Pairs include one that is too long.
        """
        texts = TEXTS[self.recipe.data.kind]
        if self.reads_pairs:
            long = " ".join([texts[0]] * self.sequence_length)
            return [texts, (long, long)]
        return [(text,) for text in (*texts, *([self.masked_text] if self.fills_masks else []))]

    def encode(self, *texts: str) -> list[int]:
        """Return the tokens of a row of one or two texts as the run reads them, cut to its longest sequence.

        A pre-trained model reads one text with its [MASK]s.
        """
        tokenizer = self.tokenizer
        if self.results is not None:
            return [int(token) for token in encode_texts([texts], tokenizer, self.sequence_length).token_ids[0]]
        (text,) = texts
        return [tokenizer.cls_id, *tokenizer.encode_with_masks(text)[: self.sequence_length - 2], tokenizer.sep_id]

    def examples(self) -> list[list[int]]:
        """Return token ids of `texts` and then of random sequences, none longer than the model was trained on.

        A model that fills masks also reads some with [MASK]s, as many as in pre-training, of a range the most.
        """
        rng = np.random.default_rng(0)
        tokenizer = self.tokenizer
        ordinary = np.flatnonzero(tokenizer.is_ordinary)
        examples = [self.encode(*texts) for texts in self.texts()]
        ratio = self.recipe.masking.mask_ratio
        highest = ratio[1] if isinstance(ratio, tuple) else ratio
        for mask_ratio in (0.0, highest) if self.fills_masks else (0.0,):
            for length in RANDOM_LENGTHS:
                ids = rng.choice(ordinary, size=min(length, self.sequence_length) - 2)
                num_masks = int(np.ceil(mask_ratio * len(ids)))
                ids[rng.permutation(len(ids))[:num_masks]] = tokenizer.mask_id
                examples.append([tokenizer.cls_id, *ids.tolist(), tokenizer.sep_id])
        return examples

    @cached_property
    def _exact_network(self) -> PlainNetwork:
        return copy.deepcopy(self.network).double()

    def outputs(self, token_ids: list[int], *, exact: bool = False) -> Tensor:
        """Return what the exported model must give for one sequence, float64.

        Logits (L, V), (L, 2) or (C,), values (C,) in the task's units, or states (L, D) of an encoder alone.

        Args:
            exact: Compute in float64; else in float32, as the run.
        """
        network = self._exact_network if exact else self.network
        ids = torch.tensor([token_ids])
        with torch.inference_mode():
            outputs: Tensor = network(ids, torch.ones_like(ids))[0][0]
        return outputs.double()


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
        licence=None if bundled_name(run) is None else LICENCE,
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
            "predict with `exlm predict RUN FILE`, or fine-tune without, as `--recipe csv-encoder` does",
        )
    scores = read_scores(finetuned.run).of_seed(results.scored_split, seed, task.split_seed)
    return Source(
        run=finetuned.run,
        recipe=finetuned.encoder_recipe,
        tokenizer=finetuned.tokenizer,
        model=finetuned.runners[seed].model,
        weights=tuple(
            best_paths(best_cell_folder(finetuned.run, of_split, one))[0]
            for of_split in results.of_splits
            for one in results.seeds
        ),
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
        reads_pairs=num_texts(task) == 2,
    )
