"""What the server of `forked.py` imports once, so that no process that it forks has to."""

from __future__ import annotations

import gc
import os
import pkgutil
from importlib import import_module

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as the entry does before it imports torch

import torch
import torch._dynamo  # takes longest; recomputation and --compile import it

import megatron_zpp
import pretrain_zeropp_gpt  # noqa: F401
from harness.quick_disk import forget_fsync

for module in pkgutil.walk_packages(megatron_zpp.__path__, "megatron_zpp."):
    import_module(module.name)
torch.set_num_threads(1)
forget_fsync()
gc.freeze()  # what is there are modules: no process that is forked has to look at them again, nor to copy their pages
