"""What the server of `forked.py` imports once, so that no process that it forks has to."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as the entry does before it imports torch

import torch

import pretrain_zeropp_gpt  # noqa: F401

torch.set_num_threads(1)
