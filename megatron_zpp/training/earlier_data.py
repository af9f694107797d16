"""What a run that goes on says about its data if they are others than those of its checkpoint's run."""

from __future__ import annotations

from dataclasses import replace

from megatron_zpp.checkpoint.progress import Progress
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
    return replace(progress, readings=earlier if earlier and earlier[-1].goes_on_as(here) else (*earlier, here))


def data_notices(config: Config, stored: StoredRun, here: Reading, datasets: Datasets) -> list[str]:
    """Lines about data that differ from those of the stored run, which goes on with `here`."""
    train, readings = datasets.train, stored.readings
    if not readings or config.training.skip_train or not isinstance(train, GPTDataset | BlendedDataset):
        return []
    then, end = readings[-1], read_samples(config, stored)
    if not then.tokenizer:
        line = "the checkpoint does not say which data its run has read, so they are not compared with the data here"
        return [line, *order_notices(config, stored)]
    if then.goes_on_as(here):
        return []
    earlier, lines = EarlierDocuments(datasets.sources, readings), []
    reasons = then.differences(here, "train")
    if reasons and here.first_sample < end:
        again = earlier.read_again(readings, train, here.first_sample, end)
        lines.append(f"WARNING: the training data or their order have changed ({_some(reasons)}): {_in_words(again, here, end)}")
    for split in ("valid", "test"):
        moved = earlier.moved(then, here, from_split=split, to_split="train")
        if moved:
            lines.append(f"WARNING: {moved} {SPLIT_WORDS[split]} documents of the checkpoint's run are training documents now")
        moved = earlier.moved(then, here, from_split="train", to_split=split)
        if moved:
            lines.append(f"WARNING: {moved} training documents of the checkpoint's run are {SPLIT_WORDS[split]} documents now")
        reasons = then.differences(here, split)
        if reasons:
            lines.append(f"WARNING: the {SPLIT_WORDS[split]} data have changed ({_some(reasons)}): losses are not comparable")
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
