"""How many samples of the training data a run puts in order, so that a resumed run goes on in the order of its checkpoint (no torch)."""

from __future__ import annotations

from megatron_zpp.config.batch_schedule import BatchSchedule, batch_schedule, length_in_samples
from megatron_zpp.config.schema import Config, TrainingConfig
from megatron_zpp.training.stored_run import StoredRun


def ordered_samples(config: Config, stored: StoredRun | None) -> int:
    """The number of samples of the training data that the run puts in order. The order follows from it where a corpus is read repeatedly.

    A run that goes on has at least as many as the stored run, so its order is the same, whatever its batches and its length are.
    """
    read = read_samples(config, stored)
    return read if stored is None or not _goes_on(config, stored) else max(read, stored.ordered_samples)


def read_samples(config: Config, stored: StoredRun | None) -> int:
    """The number of samples of the training data that are read until the end of the run, with those that the stored run has read."""
    batches = batch_schedule(config.training, config.sample_lengths)
    if stored is None or not _goes_on(config, stored):
        return length_in_samples(config.training, batches)
    return _consumed_at_the_end(config.training, batches, stored)


def order_notices(config: Config, stored: StoredRun) -> list[str]:
    """A warning if the run needs more samples of corpora than the stored run put in order."""
    if not (_goes_on(config, stored) and config.data.names_corpora):
        return []
    now, then = ordered_samples(config, stored), stored.ordered_samples
    if now <= then:
        return []
    return [
        f"WARNING: the run needs {now} samples, and the checkpoint's run had put {then} in order; where a corpus is read more than once, "
        "its samples are shuffled anew, so some may come again"
    ]


def _goes_on(config: Config, stored: StoredRun) -> bool:
    return not (stored.weights_only or config.training.skip_train)


def _consumed_at_the_end(training: TrainingConfig, batches: BatchSchedule, stored: StoredRun) -> int:
    if training.train_samples is not None:
        return training.train_samples
    remaining = max(0, training.train_iters - stored.manifest.iteration)
    return batches.as_asked.samples_after(remaining, stored.consumed_samples)
