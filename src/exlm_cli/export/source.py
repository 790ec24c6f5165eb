"""What an export takes from a run: model, tokenizer, labels, and the outputs that the exported model must repeat.

Axes: L tokens, V vocabulary, C outputs.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.finetune.model import Finetuned
from exlm_cli.finetune.results import RunResults
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.model.heads import TaskModel
from exlm_cli.run_dir import read_metrics, run_directory
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
        scores: Scores by name, as the model card shows them; `scores_are` says where they were measured.
        results: Of a fine-tuning run.
        seed: Of a fine-tuning run, the one with the best validation score.
        has_canonical_smiles: Whether it reads RDKit's canonical SMILES.
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
    results: RunResults | None = None
    seed: int | None = None
    has_canonical_smiles: bool = False

    @property
    def class_name(self) -> str:
        """The class of transformers that holds the model."""
        if self.results is None:
            return "EsmForMaskedLM"
        return "EsmForTokenClassification" if self.results.loss == "span" else "EsmForSequenceClassification"

    @property
    def predicts_masks(self) -> bool:
        """Whether the exported model predicts [MASK]s: an MLM does; those of an ExLM expand, which ESM cannot do."""
        return self.results is None and self.recipe.objective == "mlm"

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

    def texts(self) -> list[str]:
        """Return texts that the tokenizer of the exported folder must read as ours does."""
        kind = self.recipe.data.kind
        return [*TEXTS[kind], *([MASKED_TEXTS[kind]] if self.predicts_masks else [])]

    def encode(self, text: str) -> list[int]:
        """Return [CLS], the tokens of a text with its [MASK]s, and [SEP]."""
        tokenizer = self.tokenizer
        return [tokenizer.cls_id, *tokenizer.encode_with_masks(text), tokenizer.sep_id]

    def example_ids(self) -> list[list[int]]:
        """Return the tokens of the texts and of random sequences, none longer than the model was trained on."""
        rng = np.random.default_rng(0)
        tokenizer, longest = self.tokenizer, self.sequence_length
        ordinary = np.setdiff1d(np.arange(tokenizer.vocab_size), list(tokenizer.special_ids))
        drawn = [rng.choice(ordinary, size=min(length, longest) - 2).tolist() for length in RANDOM_LENGTHS]
        random_ids = [[tokenizer.cls_id, *ids, tokenizer.sep_id] for ids in drawn]
        return [*(self.encode(text)[:longest] for text in self.texts()), *random_ids]

    def outputs(self, token_ids: list[int]) -> Tensor:
        """Return the (L, V), (C,) or (L, 2) outputs of one sequence, those of a regression in the task's units."""
        ids = torch.tensor([token_ids])
        with torch.inference_mode():
            if isinstance(self.model, TaskModel):
                return self.model.in_units(self.model(ids, torch.tensor([len(token_ids)])))[0]
            index = torch.arange(len(token_ids))
            positions = torch.stack([index, torch.zeros_like(index)], dim=-1)[None]
            states = self.model.encoder(self.model.token_embedding(ids), positions, None)
            head = self.model.lm_head
            return F.linear(head(states), self.model.token_embedding.weight, head.bias)[0]


def pretrained_source(pretrained: Pretrained) -> Source:
    """Return the model of a pre-trained checkpoint with its newest validation before it."""
    run = run_directory(pretrained.checkpoint)
    log = run / "metrics.jsonl"
    rows = [row for row in (read_metrics(log) if log.is_file() else []) if row.get("kind") == "valid"]
    rows = [row for row in rows if row["step"] <= pretrained.step]
    shown = {name: rows[-1].get(name) for name in ("loss", "accuracy", "perplexity")} if rows else {}
    return Source(
        run=run,
        recipe=pretrained.recipe,
        tokenizer=pretrained.tokenizer,
        model=pretrained.model,
        sequence_length=pretrained.recipe.data.sequence_length,
        num_steps=pretrained.step,
        num_tokens=pretrained.num_tokens,
        scores={name: float(value) for name, value in shown.items() if value is not None},
        scores_are=f"on validation sequences, step {rows[-1]['step']:,}" if rows else "",
    )


def finetuned_source(finetuned: Finetuned) -> Source:
    """Return the model of the seed with the best validation score, and its scores."""
    results = finetuned.results
    seed = results.best_seed()
    scored = results.metrics[results.scored_split]
    of_seed = {name: summary.values[results.seeds.index(seed)] for name, summary in scored.items()}
    return Source(
        run=finetuned.run,
        recipe=finetuned.encoder_recipe,
        tokenizer=finetuned.tokenizer,
        model=finetuned.runners[seed].model,
        sequence_length=finetuned.sequence_length,
        num_steps=results.init.steps,
        num_tokens=results.init.tokens,
        scores={name: value for name, value in of_seed.items() if value is not None},
        scores_are=f"on the {results.scored_split} split",
        results=results,
        seed=seed,
        has_canonical_smiles=finetuned.recipe.task.has_canonical_smiles,
    )
