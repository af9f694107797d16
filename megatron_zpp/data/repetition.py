"""How often the training of a run reads the same tokens, in words (no torch)."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_zpp.config.counted import counted
from megatron_zpp.data.split_corpora import SplitCorpus

# Up to four times a text teaches almost as much as new text would (Muennighoff et al. 2023, arXiv 2305.16264).
HARMLESS_TIMES = 4
SAID_TIMES = 1.005  # from which on the number is not printed as 1
MOST_NAMES = 8


def repetition(used: Sequence[tuple[SplitCorpus, float]], sample_count: int, seq_length: int) -> list[str]:
    """A line if training reads its tokens more than once, and a line with the corpora of a blend that it reads more than HARMLESS_TIMES.

    used: corpora that have tokens to train on, each with its weight in the blend.
    """
    tokens = [corpus.token_count("train") for corpus, _ in used]
    times = sample_count * seq_length / sum(tokens)
    lines = [f"training data: {counted(sum(tokens), 'token')}, read {_in_words(times)}"] if times >= SAID_TIMES else []
    weights = sum(weight for _, weight in used)
    reads = [sample_count * seq_length * weight / weights / count for (_, weight), count in zip(used, tokens, strict=True)]
    often = [f"{corpus.prefix} {_in_words(read)}" for (corpus, _), read in zip(used, reads, strict=True) if read > HARMLESS_TIMES]
    if len(used) > 1 and often:
        more = [f"{len(often) - MOST_NAMES} more"] * (len(often) > MOST_NAMES)
        lines.append(f"training data, read more than {HARMLESS_TIMES} times: {', '.join(often[:MOST_NAMES] + more)}")
    return lines


def _in_words(times: float) -> str:
    return f"{times:.0f} times" if times >= 10 else f"{times:.3g} times"
