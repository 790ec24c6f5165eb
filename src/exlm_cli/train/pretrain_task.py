"""Pre-training as the training loop sees it: masked batches of token sequences, their loss, and validation."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.cost.counts import FlopCounter
from exlm_cli.data import IntArray
from exlm_cli.data.batch import Batch
from exlm_cli.data.corpus.prepare import PreparedData
from exlm_cli.data.corpus.shards import TokenDataset
from exlm_cli.data.sampler import EpochPlan, Feed, plan_epoch
from exlm_cli.distributed.parallel import StepModule, wrap_ddp
from exlm_cli.distributed.ranks import ALONE, Ranks
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.ops.precision import autocast, precision_on
from exlm_cli.progress import Progress, SilentProgress
from exlm_cli.train.evaluation import Sums, evaluate_batch, summarise
from exlm_cli.train.objective import Objective
from exlm_cli.train.pretrained import model_identity

MeasuredT = TypeVar("MeasuredT")

VALIDATION_EPOCH = 2**32 - 1
"""The epoch whose masks validation uses: one that training never reaches, so every validation masks the same tokens."""

SPELLED = ("loss", "loss_given_length", "loss_independent", "mask_accuracy")
"""Metrics of a validation that are also given for other spellings than the canonical one."""

VALIDATE_AT_SEQUENCES = 512
"""Sequences that `train.validate_at` scores at each number of masks."""

_VALIDATED_AT = ("loss", "loss_given_length", "mask_accuracy", "num_sequences")


class PretrainTask:
    """Masked batches of a token data set and their loss, for the training loop.

    Args:
        recipe: What to train.
        data: Its sequences.
        model: On `device`.
        device: Where batches go.
        ranks: Those that train together.
    """

    def __init__(
        self,
        recipe: PretrainRecipe,
        data: PreparedData,
        model: ExlmModel,
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        self.recipe, self.model, self.device, self.ranks = recipe, model, device, ranks
        self.train_set, self.valid_set, self.spellings = data.train, data.valid, data.spellings
        self.tokenizer = data.tokenizer
        self.objective = Objective(data.tokenizer.unk_id, recipe.masking.num_repeats, recipe.train.alignment_backend)
        self.precision = precision_on(device, recipe.train.precision)
        model.encoder.gradient_checkpointing = recipe.train.gradient_checkpointing
        if recipe.train.compile:
            model.encoder.compile_blocks()
        self.module = wrap_ddp(StepModule(model, self.objective.sequence_nll), ranks)
        # the closed form is that of our encoder
        own = recipe.model.backbone.family == "own"
        self._flops = FlopCounter(recipe, data.tokenizer.vocab_size) if own else None
        self.identity = {"data fingerprint": data.fingerprint, **model_identity(recipe, data.tokenizer)}

    def plan(self, epoch: int) -> EpochPlan:
        """Return the steps of an epoch."""
        train = self.recipe.train
        return plan_epoch(
            self.train_set.lengths * self.recipe.masking.num_repeats + 2,
            seed=self.recipe.seed,
            epoch=epoch,
            batch_sequences=train.batch_sequences,
            batch_tokens=train.batch_tokens,
            bucket_steps=train.bucket_steps,
        )

    def begin_step(self, share_done: float) -> None:
        """Fade the penalty on uneven visits of states; begin the DAG of a chain, and the encoder."""
        self.model.is_encoder_learning = share_done >= self.recipe.optim.encoder_starts_at
        if self.model.chain_head is not None:
            self.model.chain_head.begin_step(share_done, self.model.decoder_weight)
        if self.model.transition is not None:
            self.model.transition.fade_balance(share_done)

    def microbatches(self, indices: IntArray, epoch: int) -> Iterator[Batch]:
        """Return one step's masked, expanded and padded microbatches; start preparing the first one now."""
        return self._feed(self.train_set, epoch, flops=self._flops).microbatches(indices, self.device)

    def count_microbatches(self, indices: IntArray, epoch: int) -> int:
        """Return how many of them there are."""
        return self._feed(self.train_set, epoch).count_microbatches(indices)

    def losses(self, batch: Batch) -> Tensor:
        """Return nats per target of each sequence."""
        with self._autocast():
            losses: Tensor = self.module(batch)
        return losses

    def count_tokens(self, batch: Batch) -> int:
        """Return the input tokens before expansion."""
        return batch.num_tokens

    def count_flops(self, batch: Batch) -> float:
        """Return the FLOPs of training on a batch without its padding; 0 for an encoder that is not our own."""
        return batch.flops

    def validate(self, progress: Progress | None = None) -> dict[str, float]:
        """Return metrics on the validation set, with the same masks every time; `progress` shows a bar of sequences.

        Where molecules have several spellings, these metrics are of canonical SMILES, and `SPELLED` ones of the others
        have `_spellings` at the end of their names.
        """
        progress = progress or SilentProgress()
        metrics = self._validate(self.valid_set, progress)
        if self.spellings:
            others = self._validate(self.spellings, progress)
            metrics |= {f"{name}_spellings": others[name] for name in SPELLED if name in others}
        return metrics

    def validate_at(
        self, max_sequences: int | None = VALIDATE_AT_SEQUENCES, progress: Progress | None = None
    ) -> list[dict[str, float]]:
        """Return loss and accuracy at each of `train.validate_at`, the same masks every time, as rows with `at`."""
        indices = validation_indices(self.valid_set, max_sequences)
        rows = []
        for at in self.recipe.train.validate_at:
            found = summarise(self.measure(self.valid_set, indices, self._evaluate, progress or SilentProgress(), at))
            rows.append({"at": at, **{name: found[name] for name in _VALIDATED_AT}})
        return rows

    def measure(
        self,
        dataset: TokenDataset,
        indices: IntArray,
        measure: Callable[[Any, Batch], MeasuredT],
        progress: Progress,
        at: float | None = None,
    ) -> list[MeasuredT]:
        """Return the results of `measure(model, batch)` on each batch of validation sequences, from all ranks.

        Args:
            indices: Sequences of `dataset`.
            measure: Runs without gradients, the model in evaluation mode.
            progress: Shows a bar of sequences.
            at: A number of masks or a mask ratio; None: as `masking` of the recipe says.
        """
        share = self.ranks.shares_of(indices)[self.ranks.rank]
        feed = self._feed(dataset, VALIDATION_EPOCH, at=at)
        batches = feed.microbatches(share, self.device) if len(share) else ()
        own: list[MeasuredT] = []
        num_done = 0
        self.model.eval()
        with progress.bar("validating", len(share)) as bar, torch.no_grad(), self._autocast():
            for batch in batches:
                own.append(measure(self.model, batch))
                num_done += len(batch.token_ids)
                bar.update(num_done)
        self.model.train()
        return [row for rows in self.ranks.all_gather_object(own) for row in rows]

    def _validate(self, dataset: TokenDataset, progress: Progress) -> dict[str, float]:
        indices = validation_indices(dataset, self.recipe.train.validation_sequences)
        return summarise(self.measure(dataset, indices, self._evaluate, progress))

    def _evaluate(self, model: Any, batch: Batch) -> Sums:
        return evaluate_batch(model, self.objective, batch)

    def _feed(
        self, dataset: TokenDataset, epoch: int, *, flops: FlopCounter | None = None, at: float | None = None
    ) -> Feed:
        return Feed(dataset, self.recipe, self.tokenizer, epoch, flops, at)

    def _autocast(self) -> torch.autocast:
        return autocast(self.device, self.precision)


def validation_indices(dataset: TokenDataset, limit: int | None) -> IntArray:
    """Return evenly spread indices of at most `limit` sequences; None: of all."""
    size = len(dataset)
    count = size if limit is None else min(limit, size)
    spread: IntArray = torch.linspace(0, size - 1, count, dtype=torch.float64).round().long().numpy()
    return spread
