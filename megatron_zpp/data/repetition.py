"""How often a run reads the same tokens, in words (no torch)."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_zpp.config.counted import counted
from megatron_zpp.data.split_corpora import SPLIT_WORDS, SplitCorpus

# Up to four times a text teaches almost as much as new text would (Muennighoff et al. 2023, arXiv 2305.16264).
HARMLESS_TIMES = 4
SAID_TIMES = 1.005  # from which on the number is not printed as 1
MOST_NAMES = 8


def repetition(
    used: Sequence[tuple[SplitCorpus, float]], sample_count: int, seq_length: int, split_name: str = "train", set_name: str = ""
) -> list[str]:
    """A line if tokens are read more than once, and a line with the corpora of a blend that are read more than HARMLESS_TIMES.

    used: corpora that have tokens in the split, each with its weight in the blend. sample_count: samples that training, or one evaluation
    of validation or test data, reads. set_name: of a validation set that is one of several.
    """
    data = f"{SPLIT_WORDS[split_name]} data" + (f" {set_name}" if set_name else "")
    is_read = "read" if split_name == "train" else "read by each evaluation"
    tokens = {corpus.prefix: corpus.token_count(split_name) for corpus, _ in used}  # a blend may name a corpus twice
    times = sample_count * seq_length / sum(tokens.values())
    lines = [f"{data}: {counted(sum(tokens.values()), 'token')}, {is_read} {_in_words(times)}"] if times >= SAID_TIMES else []
    weights = dict.fromkeys(tokens, 0.0)
    for corpus, weight in used:
        weights[corpus.prefix] += weight
    reads = {prefix: sample_count * seq_length * weights[prefix] / sum(weights.values()) / count for prefix, count in tokens.items()}
    often = [f"{prefix} {_in_words(read)}" for prefix, read in reads.items() if read > HARMLESS_TIMES]
    if len(tokens) > 1 and often:
        more = [f"{len(often) - MOST_NAMES} more"] * (len(often) > MOST_NAMES)
        lines.append(f"{data}, {is_read} more than {HARMLESS_TIMES} times: {', '.join(often[:MOST_NAMES] + more)}")
    return lines


def _in_words(times: float) -> str:
    return f"{times:.0f} times" if times >= 10 else f"{times:.3g} times"
