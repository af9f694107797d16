"""A run whose disk is full from its second checkpoint on; a program for test_checkpoint_flags."""

from __future__ import annotations

import sys
from typing import Any

from megatron_zpp.checkpoint import shard_file
from pretrain_zeropp_gpt import main


def failing_write(file: Any, buffer: memoryview) -> None:
    if "iter_0000002" not in file.name:
        raise OSError(28, "No space left on device")
    write(file, buffer)


write = shard_file._write
shard_file._write = failing_write
sys.exit(main(sys.argv[1:]))
