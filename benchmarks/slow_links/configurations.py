"""The compared configurations (our ZeRO-3, the features and both sets of ZeRO++, and its peers), and the GPT that all train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.data.tokenizers.tokenizer import padded_vocab_size
from megatron_zpp.model.flops import parameter_count

FSDP2 = "FSDP2"
DEEPSPEED = "DeepSpeed ZeRO-3"
DEEPSPEED_KEPT = "DeepSpeed ZeRO-3 (weights kept)"
DEEPSPEED_HPZ = "DeepSpeed hpZ"
DEEPSPEEDS = (DEEPSPEED, DEEPSPEED_KEPT, DEEPSPEED_HPZ)
# By the word of --peers.
PEERS = {"fsdp2": FSDP2, "deepspeed": DEEPSPEED, "deepspeed-kept": DEEPSPEED_KEPT, "deepspeed-hpz": DEEPSPEED_HPZ}
ZERO3 = "ZeRO-3"
ALL = "ZeRO++"
LEAN = "lean"
FEATURES = {
    "qwZ": ["--zero-quantized-weights"],
    "hpZ": ["--zero-hpz-partition-size", "{ranks_per_node}"],
    "qgZ": ["--zero-quantized-gradients"],
}
SETS = {ALL: ["--zeropp", "paper"], LEAN: ["--zeropp", "lean"]}
OURS = (ZERO3, *(f"+{name}" for name in FEATURES), *SETS)
NAMES = (*PEERS.values(), *OURS)
# Without dropout: both draw its random numbers differently, and its speed is not compared.
COMMON = "--bf16 --mock-data --num-workers 0 --lr 1e-4 --lr-decay-style constant --attention-dropout 0 --hidden-dropout 0 --eval-iters 0"
DEFAULT_MODEL = "--num-layers 6 --hidden-size 640 --num-attention-heads 10 --seq-length 256 --vocab-size 6144"
SMOKE_MODEL = "--num-layers 1 --hidden-size 576 --num-attention-heads 9 --seq-length 16 --vocab-size 8192"


@dataclass(frozen=True)
class Workload:
    """The world and what each of its ranks trains; flags are the training script's."""

    nodes: int
    ranks_per_node: int
    model: str = DEFAULT_MODEL
    micro_batch_size: int = 1
    microbatches: int = 1
    extra: list[str] = field(default_factory=list)

    @classmethod
    def of_subject(cls, subject: Mapping[str, Any]) -> Workload:
        """What the ranks of a stored measurement trained. subject: of its file."""
        world = (subject["nodes"], subject["ranks_per_node"], subject["model"], subject["micro_batch_size"])
        return cls(*world, subject["gradient_accumulation"], subject["flags"])

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @cached_property
    def model_config(self) -> ModelConfig:
        return resolve(parse_flags(self.flags(ZERO3)), self.world_size, self.ranks_per_node).model

    @cached_property
    def padded_vocab_size(self) -> int:
        given = parse_flags(self.flags(ZERO3))
        return padded_vocab_size(given.data.vocab_size or 1, given.model.make_vocab_size_divisible_by)

    @cached_property
    def parameters(self) -> int:
        return parameter_count(self.model_config, self.padded_vocab_size)

    @property
    def model_share_bytes(self) -> float:
        """M (N - 1)/N: the bytes that enter a node if every slice of the other nodes enters once, in 16 bits."""
        return 2 * self.parameters * (self.nodes - 1) / self.nodes

    @property
    def tokens_per_step(self) -> int:
        return self.micro_batch_size * self.microbatches * self.world_size * self.model_config.seq_length

    def flags(self, name: str) -> list[str]:
        """The training script's flags of one configuration. Peers have those of ZeRO-3 and ignore the ZeRO flags."""
        samples = self.micro_batch_size * self.microbatches * self.world_size
        batch = ["--micro-batch-size", str(self.micro_batch_size), "--global-batch-size", str(samples), "--train-iters", "1000000"]
        words = SETS.get(name) or FEATURES.get(name.removeprefix("+"), [])
        switches = [word.format(ranks_per_node=self.ranks_per_node) for word in words]
        return [*COMMON.split(), *self.model.split(), *batch, "--zero-stage", "3", *switches, *self.extra]
