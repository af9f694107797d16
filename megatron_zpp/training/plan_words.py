"""What --dry-run and tools/plan_run.py say alike about a plan, in lines that fit into a terminal."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from megatron_zpp.config.batch_schedule import SUFFIXES
from megatron_zpp.config.counted import counted
from megatron_zpp.config.groups.data import TOKENIZER_FILES
from megatron_zpp.config.schema import Config
from megatron_zpp.model.flops import model_flops, parameter_count
from megatron_zpp.training.hardware import TERA

if TYPE_CHECKING:  # it imports torch
    from megatron_zpp.training.run_plan import RunPlan

COLUMNS = 120


def wrapped(text: str, indent: str = "  ") -> str:
    """The text in lines of COLUMNS characters at most, if no word is longer. indent: before each line but the first."""
    return textwrap.fill(text, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def model_in_words(plan: RunPlan, vocab_size: int) -> str:
    """Parameters, the vocabulary with where its size is from, and the type of weights."""
    parameters = parameter_count(plan.config.model, plan.padded_vocab_size)
    padded = f" padded to {plan.padded_vocab_size}" if plan.padded_vocab_size != vocab_size else ""
    return (
        f"{parameters} ({short(parameters)}), vocabulary of {vocab_size} ({_source_of_vocabulary(plan.config)}){padded}, "
        f"weights in {_precision(plan.config)}"
    )


def _source_of_vocabulary(config: Config) -> str:
    if any(getattr(config.data, name) is not None for name in TOKENIZER_FILES):
        return f"of {config.data.tokenizer_type}"
    if "vocab_size" in config.given:
        return config.sources.get("vocab_size", "--vocab-size")
    return "assumed: no tokenizer and no --vocab-size is given"


def _precision(config: Config) -> str:
    names = [name for name, is_on in (("bf16", config.precision.bf16), ("fp16", config.precision.fp16)) if is_on]
    return names[0] if names else "fp32, because neither --bf16 nor --fp16 is given"


def islands_in_words(plan: RunPlan) -> str:
    """`2 islands, joined every 16 iterations`; empty without islands."""
    period = plan.config.diloco.diloco_sync_period
    return "" if period is None else f"{counted(plan.islands, 'island')}, joined every {counted(period, 'iteration')}"


def tokens_per_second(plan: RunPlan, seconds: float) -> float:
    """Of all ranks together, in steps of so many seconds."""
    return plan.config.training.global_batch_size * plan.config.model.seq_length / seconds


def model_teraflops(plan: RunPlan, seconds: float) -> float:
    """Model TFLOP/s of one rank in steps of so many seconds."""
    operations = model_flops(plan.config.model, plan.padded_vocab_size, plan.config.training.global_batch_size)
    return operations / plan.world_size / seconds / TERA


def mfu(plan: RunPlan, seconds: float) -> float | None:
    """Model FLOP/s as a fraction of --device-peak-tflops; None without it."""
    peak = plan.config.logging.device_peak_tflops
    return None if peak is None else model_teraflops(plan, seconds) / peak


def short(number: float) -> str:
    """`512`, `1.86M`, `6.69B`: three digits and a suffix."""
    for suffix, unit in reversed(SUFFIXES.items()):
        if number >= 0.9995 * unit:
            return f"{rounded(number / unit, 3)}{suffix}"
    return rounded(number, 3)


def rounded(number: float, digits: int = 4) -> str:
    """The number with so many digits, without an exponent unless it is below 0.0001: `0.002809`, `170.7`, `12345`."""
    text = f"{number:.{digits}g}"
    return f"{number:.0f}" if "e+" in text else text
