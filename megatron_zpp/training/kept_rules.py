"""Rules that a run takes over from its checkpoint or its corpora, where defaults have changed since (no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from megatron_zpp.checkpoint.older_flags import flags_of
from megatron_zpp.config.data_sources import read_sources
from megatron_zpp.config.groups.data import CHANGED_TOKENIZERS
from megatron_zpp.config.rules_run import has_weights
from megatron_zpp.config.schema import Config, DataConfig
from megatron_zpp.training.stored_run import StoredRun


class KeptRules(NamedTuple):
    """The configuration with the rules that are kept, and a line for each that differs from what the flags would mean in a new run."""

    config: Config
    notices: tuple[str, ...]


def with_kept_rules(config: Config, stored: StoredRun | None) -> KeptRules:
    """The rules of `stored` in place of defaults; without it, those that the corpora show. A flag that is given wins."""
    lines: list[str] = []
    values: dict[str, Any] = {}
    data, model = ({}, {}) if stored is None else (flags_of(stored.manifest, "data"), flags_of(stored.manifest, "model"))
    is_continued = stored is not None and not stored.weights_only
    if is_continued and "blend_normalization" not in config.given:
        values["blend_normalization"] = data.get("blend_normalization", config.data.blend_normalization)
        if values["blend_normalization"] != config.data.blend_normalization and has_weights(read_sources(config.data)):
            lines.append("samples are dealt to corpora as in the checkpoint's run: --blend-normalization once")
    if "legacy_tokenizer" not in config.given:
        origin = _origin_of_earlier_tokenizer(config.data, data, is_continued=is_continued)
        if origin is not None:
            values["legacy_tokenizer"] = True
            lines.append(f"--legacy-tokenizer: {origin} the earlier {config.data.tokenizer_type}")
    if model.get("openai_gelu") and config.model.has_exact_gelu:
        values["openai_gelu"] = True
        lines.append("--openai-gelu: the checkpoint was trained with the tanh form of GELU")
    return KeptRules(config.with_values(**values), tuple(lines))


def _origin_of_earlier_tokenizer(data: DataConfig, stored: Mapping[str, Any], *, is_continued: bool) -> str | None:
    """What shows that the run needs the earlier form of its tokenizer, in words; None if nothing does.

    Corpora are not asked if the run goes on with the tokenizer of its checkpoint.
    """
    is_same = stored.get("tokenizer_type") == data.tokenizer_type
    if is_same and stored["legacy_tokenizer"] and data.tokenizer_type in CHANGED_TOKENIZERS:
        return "the checkpoint's run had"
    if not (is_same and is_continued) and has_earlier_ends(data):
        return "documents end as with"
    return None


def has_earlier_ends(data: DataConfig) -> bool:
    """Whether documents of a corpus end in the <EOD> that SentencePieceTokenizer once added, and --tokenizer-type names this tokenizer."""
    if data.tokenizer_type != "SentencePieceTokenizer" or not data.names_corpora:
        return False
    from megatron_zpp.data.indexed_dataset import IndexedDataset  # imports numpy
    from megatron_zpp.data.tokenizers.tokenizer import build_tokenizer

    end = build_tokenizer(replace(data, legacy_tokenizer=True, vocab_size=None)).eod  # a given size may be that of today's form
    blends = read_sources(data).blends.values()
    return any(end in IndexedDataset(prefix).last_tokens() for blend in blends for prefix in blend.prefixes)
