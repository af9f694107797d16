"""What a run that goes on says about its data if they are others than those of its checkpoint's run."""

from __future__ import annotations

from dataclasses import replace

from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.config.data_sources import SPLITS
from megatron_zpp.config.schema import Config
from megatron_zpp.data.blended_dataset import BlendedDataset
from megatron_zpp.data.datasets import Datasets
from megatron_zpp.data.gpt_dataset import GPTDataset
from megatron_zpp.data.read_again import Again, EarlierDocuments
from megatron_zpp.data.reading import Reading
from megatron_zpp.data.split_corpora import SPLIT_WORDS
from megatron_zpp.training.sample_order import order_notices, read_samples
from megatron_zpp.training.setup import Vocabulary
from megatron_zpp.training.stored_run import StoredRun

MOST_REASONS = 4


def reading_of_run(config: Config, vocabulary: Vocabulary, datasets: Datasets, first_sample: int) -> Reading:
    """What the run reads from sample `first_sample` on."""
    tokenizer = f"{config.data.tokenizer_type} of {vocabulary.size} ids, of which {vocabulary.eod} ends a document"
    return Reading(first_sample, config.model.seq_length, tokenizer, datasets.orders)


def with_reading(progress: Progress, here: Reading) -> Progress:
    """The progress with `here` as its latest reading, if that is another one than before."""
    earlier = tuple(reading for reading in progress.readings if reading.first_sample < here.first_sample)
    is_same = bool(earlier) and replace(earlier[-1], first_sample=here.first_sample) == here
    return replace(progress, readings=earlier if is_same else (*earlier, here))


def data_notices(config: Config, stored: StoredRun, here: Reading, datasets: Datasets) -> list[str]:
    """Lines about data that differ from those of the stored run, which goes on with `here`."""
    train, readings = datasets.train, stored.readings
    if not readings or config.training.skip_train or not isinstance(train, GPTDataset | BlendedDataset):
        return []
    then, end = readings[-1], read_samples(config, stored)
    if not then.tokenizer:
        line = "the checkpoint does not say which data its run has read, so they are not compared with the data here"
        return [line, *order_notices(config, stored)]
    lines: list[str] = []
    reasons = {split: then.differences(here, split) for split in SPLITS}
    if any(reasons.values()):  # else nothing is read for it
        earlier = EarlierDocuments(datasets.sources, readings, here)
        if reasons["train"] and here.first_sample < end:
            again = _in_words(earlier.read_again(train, end), here, end)
            lines.append(f"WARNING: the training data or their order have changed ({_some(reasons['train'])}): {again}")
        for split in ("valid", "test"):
            for from_split, to_split in ((split, "train"), ("train", split)):
                moved, before, now = earlier.moved(from_split=from_split, to_split=to_split), SPLIT_WORDS[from_split], SPLIT_WORDS[to_split]
                lines += [f"WARNING: {moved} {before} documents of the checkpoint's run are {now} documents now"] if moved else []
            if reasons[split]:
                lines.append(f"WARNING: the {SPLIT_WORDS[split]} data have changed ({_some(reasons[split])}): losses are not comparable")
    if then.tokenizer != here.tokenizer:
        lines.append(f"WARNING: the checkpoint's run had another tokenizer: {then.tokenizer} there and {here.tokenizer} here")
    return lines


def _in_words(again: Again, here: Reading, end: int) -> str:
    all_tokens = (end - here.first_sample) * here.seq_length
    if again.counted_tokens == all_tokens:
        found = f"of the {all_tokens} tokens that are read from here on, {again.tokens} were read before"
    else:
        found = f"of the {all_tokens} tokens that are read from here on, about {again.tokens / again.counted_tokens:.1%} were read before"
    return found + (f"; not counted: {_some(again.uncounted)}" if again.uncounted else "")


def _some(words: list[str] | tuple[str, ...]) -> str:
    more = len(words) - MOST_REASONS
    return ", ".join([*words[:MOST_REASONS], *([f"and {more} more"] if more > 0 else [])])
