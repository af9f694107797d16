"""Evaluation: its data, the iterations after which it runs, and its loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_zpp.config.schema import Config, TrainingConfig
from megatron_zpp.data.datasets import Datasets
from megatron_zpp.data.gpt_dataset import SampleSource
from megatron_zpp.data.loader import MicroBatch, MicroBatches, TokenPart
from megatron_zpp.data.sampler import MicroBatchIndices, MicroBatchSampler, WholePassSampler
from megatron_zpp.outer.steps import OuterSteps
from megatron_zpp.training.same_samples import SameSamples
from megatron_zpp.training.step import token_losses
from megatron_zpp.zero.engine import ZeroEngine


@dataclass(frozen=True)
class HeldOutSet:
    """Data of one rank. Each evaluation takes the next `microbatches` micro-batches of `batches`. name: "" if there is only one set.

    check: has read the micro-batches that were taken.
    """

    name: str
    batches: MicroBatches
    microbatches: int
    check: SameSamples


class HeldOutSets:
    """This rank's share of the validation and the test data.

    validation: empty if --eval-iters is 0. test: None if there are no test data, or --eval-iters is 0.
    """

    def __init__(
        self,
        config: Config,
        datasets: Datasets,
        iteration: int,
        *,
        group: int,
        groups: int,
        part: TokenPart,
        make_check: Callable[[], SameSamples],
    ) -> None:
        """iteration: the last one that is done. Validation continues after the data that validations up to it have used.

        group: the sample group of this rank, of `groups`; the rank keeps `part` of each sample.
        make_check: makes the check of one set.
        """
        self._training = config.training
        self._num_workers = config.data.num_workers
        self._rules = datasets.rules
        self._make_check = make_check
        self._sample_group, self._sample_groups, self._part = group, groups, part
        self.validation = self._validation(datasets, evaluations_before(iteration, config.training))
        self.test: HeldOutSet | None = None
        if datasets.test is not None and config.training.eval_iters > 0:
            self.test = self._drawn("", datasets.test, 0)

    @property
    def final_evaluations(self) -> int:
        """The number of evaluations that follow the last iteration."""
        return len(self.validation) + (self.test is not None)

    def _validation(self, datasets: Datasets, evaluations: int) -> list[HeldOutSet]:
        if self._training.full_validation:
            return [self._whole(name, source) for name, source in datasets.valid.items()]
        if self._training.eval_iters == 0:
            return []
        return [self._drawn(name, source, evaluations) for name, source in datasets.valid.items()]

    def _whole(self, name: str, source: SampleSource) -> HeldOutSet:
        sampler = WholePassSampler(len(source), self._training.eval_micro_batch_size, self._sample_group, self._sample_groups)
        return self._set(name, source, sampler, sampler.microbatches)

    def _drawn(self, name: str, source: SampleSource, evaluations: int) -> HeldOutSet:
        """evaluations: number of evaluations so far."""
        size = self._training.eval_micro_batch_size
        microbatches = self._training.eval_iters * (self._training.eval_global_batch_size // (size * self._sample_groups))
        consumed_samples = evaluations * microbatches * size * self._sample_groups
        sampler = MicroBatchSampler(len(source), consumed_samples, size, self._sample_group, self._sample_groups)
        return self._set(name, source, sampler, microbatches)

    def _set(self, name: str, source: SampleSource, sampler: Iterable[MicroBatchIndices], microbatches: int) -> HeldOutSet:
        check = self._make_check()
        return HeldOutSet(name, MicroBatches(source, sampler, self._num_workers, self._rules, check.read, self._part), microbatches, check)


def evaluations_before(iteration: int, training: TrainingConfig) -> int:
    """Number of validations after iterations up to and including this one, in a run that continues after it."""
    return max(0, iteration // training.eval_interval - max(0, training.start_eval_at_iter - 1) // training.eval_interval)


def is_followed_by_validation(iteration: int, training: TrainingConfig) -> bool:
    """Whether a validation follows this iteration. The last iteration has rules of its own."""
    return iteration % training.eval_interval == 0 and iteration >= training.start_eval_at_iter


@torch.no_grad()
def evaluate(model: nn.Module, engine: ZeroEngine, held_out: HeldOutSet, outer: OuterSteps | None = None) -> float:
    """The mean loss per token of one evaluation, over all data ranks and without dropout. Every rank must call it.

    outer: the outer steps of islands, whose outer weights are evaluated.

    A token counts if the loss mask has a 1 for it. Tokens that count have equal weights, even if micro-batches are not full. Returns NaN if
    no token counts. Uses the same decoded weights as training, and does not influence training. Raises RuntimeError as `SameSamples` does.
    """
    model.eval()
    everyone = engine if outer is None else outer.everyone
    with nullcontext() if outer is None else outer.outer_weights():
        sums = [_loss_and_tokens(model, next(held_out.batches), engine.device) for _ in range(held_out.microbatches)]
    gathered = everyone.gather_world(held_out.check.append_to(torch.stack(sums).sum(dim=0)))  # [data ranks, tensor ranks, 2 or 3] fp64
    rows = gathered.flatten(0, 1).tolist()
    held_out.check.compare([checksum for row in rows for checksum in row[2:]])
    loss, tokens, *_ = map(sum, zip(*rows[:: gathered.shape[1]], strict=True))  # tensor ranks have the same sums
    return loss / tokens if tokens > 0 else math.nan


def _loss_and_tokens(model: nn.Module, batch: MicroBatch, device: torch.device) -> Tensor:
    """Sum of the losses that count, and their number: [2] fp64."""
    loss_BQ, loss_mask_BQ = token_losses(model, batch, device)
    return torch.stack([(loss_BQ * loss_mask_BQ).double().sum(), loss_mask_BQ.double().sum()])
