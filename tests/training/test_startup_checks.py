from __future__ import annotations

import pytest
import torch
from harness.tiny_runs import TINY

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.training.startup_checks import prepare_kernels


@pytest.mark.parametrize(
    ("flags", "has_line"),
    [
        ("--hidden-dropout 0", False),
        ("--hidden-dropout 0 --attention-dropout 0.1", False),
        ("--hidden-dropout 0.1 --attention-dropout 0", True),
        ("--hidden-dropout 0 --zero-quantized-gradients", True),
    ],
)
def test_kernels_are_loaded_and_named_if_quantization_or_hidden_dropout_needs_them(flags: str, has_line: bool) -> None:
    config = resolve(parse_flags([*TINY, "--train-iters", "1", "--zero-stage", "3", *flags.split()]), 1, 1)
    line = prepare_kernels(config, torch.device("cpu"))
    assert line.startswith("Quantization and dropout run on the ") if has_line else line == ""
