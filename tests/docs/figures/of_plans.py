"""Figures of plans: memory, bytes and modelled times. Whole tables of plans are compared in tests of their own pages (ELSEWHERE)."""

from __future__ import annotations

import re
import shlex
from functools import cache

from drawing.memory import plan_of
from figures.figure import Figure
from figures.results import results
from harness.places import ROOT

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.counted import in_gib
from megatron_zpp.config.resolve import resolve
from megatron_zpp.data.tokenizers.tokenizer import padded_vocab_size
from megatron_zpp.model.flops import hardware_flops
from megatron_zpp.training.hardware import GIGABYTE, TERA, planned_machine
from megatron_zpp.training.members import PlannedWorld
from megatron_zpp.training.memory_need import MemoryNeed
from megatron_zpp.training.plan.clock import StepTime
from megatron_zpp.training.plan.kinds import ACTIVATIONS, GATHERED
from megatron_zpp.training.run_plan import RunPlan, plan_as_given

GIB = 2**30
ZEROPP = "docs/zeropp.md"
MEMORY, RECOMPUTATION, LONG, TENSOR, DEEPSPEED = (
    f"docs/{name}.md" for name in ("memory", "recomputation", "long_sequences", "tensor_parallel", "coming_from_deepspeed")
)
LLAMA_VOCABULARY = 128256
FULL = "--recompute-granularity full --recompute-method"
RECOMPUTED = {
    "nothing, whole logits": "--loss-chunk-tokens 0",
    "nothing, loss in chunks": "",
    "attention": "--recompute-activations",
    "every block, N = 1": "--checkpoint-activations",
    **{f"chunks, N = {n}": f"--checkpoint-activations --recompute-num-layers {n}" for n in (2, 4, 8)},
    "the first 16 of 32 blocks": f"{FULL} block --recompute-num-layers 16",
}


@cache
def of_llama(flags: str) -> RunPlan:
    """Llama 3.1 8B with one sample of 8192 tokens, stage 3 on two nodes of 8."""
    script = (ROOT / "scripts" / "models" / "llama3.1_8b.sh").read_text(encoding="utf-8")
    (model,) = re.findall(r"MODEL_ARGS=\((.*?)\)", script, re.DOTALL)
    run = f"--vocab-size {LLAMA_VOCABULARY} --mock-data --train-iters 1 --bf16 --zero-stage 3 --micro-batch-size 1 --global-batch-size 16"
    config = resolve(parse_flags(shlex.split(f"{model} {run} {flags}")), 16, 8)
    return plan_as_given(config, PlannedWorld(2, 8, is_on_gpu=True), LLAMA_VOCABULARY)


def operations(flags: str) -> int:
    return hardware_flops(of_llama(flags).config.model, LLAMA_VOCABULARY, 1, micro_batch_size=1)


def recomputed(flags: str) -> list[object]:
    need = of_llama(flags).memory
    ratio = operations(flags) / operations(RECOMPUTED["nothing, whole logits"])
    return [in_gib(need.of(ACTIVATIONS)), in_gib(need.of(GATHERED)), "1" if ratio == 1 else f"{ratio:.2f}"]


@cache
def time_of(flags: str) -> StepTime:
    """Of the example with 7 billion parameters."""
    plan = plan_of(f"--zero-stage 3 --checkpoint-activations {flags}")
    return plan.time(planned_machine(100, 100, 80 * TERA, is_on_gpu=True))


def hidden_adam() -> float:
    """Seconds of AdamW on the host that a step with micro-batches of 8 samples does not see."""
    offloaded, plain = time_of("--micro-batch-size 8 --optimizer-cpu-offload"), time_of("--micro-batch-size 8")
    return offloaded.host - (offloaded.seconds - plain.seconds)


def exchanged(tokens: int, ranks: int, blocks: int, channels: int) -> float:
    """Bytes of attention's exchange into a rank, for three passes: q and output, keys and values, of the parts of other ranks."""
    return blocks * 3 * (ranks - 1) / ranks * tokens * 2 * channels / ranks


@cache
def of_quickstart(flags: str) -> RunPlan:
    """The model of scripts/quickstart.sh on two nodes of two."""
    script = (ROOT / "scripts" / "quickstart.sh").read_text(encoding="utf-8")
    (model,) = re.findall(r"^MODEL=\((.*?)\)$", script, re.MULTILINE)
    (vocabulary,) = re.findall(r"VOCAB_SIZE=(\d+)", script)
    run = f"{model} --vocab-size {vocabulary} --bf16 --mock-data --train-iters 1 --lr 1 --global-batch-size 32 --micro-batch-size 8 {flags}"
    return plan_as_given(resolve(parse_flags(run.split()), 4, 2), PlannedWorld(2, 2, is_on_gpu=False), int(vocabulary))


def quickstart_row(name: str, flags: str) -> list[float]:
    """Planned megabytes into a node, as a share of ZeRO-3's, into a rank inside its node, and of states; then the last logged loss."""
    plan, logged = of_quickstart(flags), results("quickstart")["compared"][name]
    share = plan.node_bytes / of_quickstart("--zero-stage 3").node_bytes
    return [plan.node_bytes / 1e6, share, plan.rank_bytes / 1e6, plan.memory.states / 1e6, logged["losses"]["12"]]


@cache
def of_tutorial(nodes: int, ranks_per_node: int) -> MemoryNeed:
    """The need of a rank under the command of DeepSpeed's tutorial. One rank computes on a CPU."""
    (command,) = re.findall(
        r"^python pretrain_zeropp_gpt.py (.*?)```", (ROOT / DEEPSPEED).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    config = resolve(parse_flags(shlex.split(command.replace("\\\n", " "))), nodes * ranks_per_node, ranks_per_node)
    vocabulary = padded_vocab_size(config.data.vocab_size or 1, config.model.make_vocab_size_divisible_by)
    return plan_as_given(config, PlannedWorld(nodes, ranks_per_node, is_on_gpu=nodes > 1), vocabulary).memory


def largest_deviation() -> float:
    """Of planned bytes from the peaks of torch's allocator with fake GPUs, as a share of these."""
    return max(abs(run["planned_bytes"] / run["peak_bytes"] - 1) for run in results("gpu_host_path")["measured"])


FIGURES = (
    Figure(ZEROPP, "| ZeRO-3 | {0:.2f} | {2:.2f} | {3:.2f} | {4:.3f} |", lambda: quickstart_row("ZeRO-3", "--zero-stage 3")),
    Figure(ZEROPP, "| ZeRO++ | {:.2f} ({:.3f} of it) | {:.2f} | {:.2f} | {:.3f} |", lambda: quickstart_row("ZeRO++", "--zeropp paper")),
    Figure(ZEROPP, "| lean | {:.2f} ({:.3f} of it) | {:.2f} | {:.2f} | {:.3f} |", lambda: quickstart_row("lean", "--zeropp lean")),
    Figure(
        DEEPSPEED,
        "One rank on a CPU needs {:.0f} GiB. In the tutorial's world, 4 nodes of 16 GPUs, each rank needs about {:.0f} GiB; "
        "{:.1f} GiB of them are an estimate",
        lambda: [nbytes / GIB for nbytes in (of_tutorial(1, 1).total, of_tutorial(4, 16).total, of_tutorial(4, 16).device.total)],
    ),
    *(Figure(RECOMPUTATION, f"| {name} |" + " {} |" * 3, lambda flags=flags: recomputed(flags)) for name, flags in RECOMPUTED.items()),
    Figure(
        RECOMPUTATION,
        "An input has {:.0f} MiB, so I is {:.0f} GiB.",
        lambda: (8 * 2048 * 4096 * 2 / 2**20, 32 * 8 * 2048 * 4096 * 2 / GIB),
    ),
    Figure(RECOMPUTATION, "8192 tokens of a vocabulary of 128256 are {:.0f} GiB in bf16", lambda: [8192 * LLAMA_VOCABULARY * 2 / GIB]),
    Figure(MEMORY, "is within {:.0f} % of the peaks of torch's allocator", lambda: [100 * largest_deviation()]),
    Figure(MEMORY, "24 GB are {:.1f} GiB.", lambda: [24e9 / GIB]),
    Figure(
        MEMORY,
        "The host of the node needs 8 x {:.1f} = {:.0f} GiB.",
        lambda: [times * plan_of("--zero-stage 3 --optimizer-cpu-offload").memory.host / GIB for times in (1, 8)],
    ),
    Figure(MEMORY, "AdamW takes the host {:.1f} s:", lambda: [time_of("--optimizer-cpu-offload").host]),
    Figure(
        MEMORY,
        "Micro-batches of 8 samples hide {:.1f} of the {:.1f} s.",
        lambda: (hidden_adam(), time_of("--optimizer-cpu-offload").host),
    ),
    Figure(
        LONG,
        "x 131072 x 2 bytes x (2 x 4096 + 2 x 8 x 128)/8 = {:.2f} GB.",
        lambda: [exchanged(131072, 8, 32, 2 * 4096 + 2 * 8 * 128) / GIGABYTE],
    ),
    Figure(
        LONG,
        "inside a node (`--intra-gigabytes`) that is {:.2f} s of",
        lambda: [exchanged(131072, 8, 32, 2 * 4096 + 2 * 8 * 128) / 100e9],
    ),
    Figure(
        LONG,
        "{:.0f} GB into each node, which take {:.0f} s at 400 Gbit/s.",
        lambda: [8 * 8 / 15 * 2 * exchanged(131072, 16, 32, 2 * 4096 + 2 * 16 * 128) / unit for unit in (GIGABYTE, 400e9 / 8)],
    ),
    Figure(
        TENSOR,
        "A whole block of a 70B model takes {:.1f} GB in bf16",
        lambda: [2 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672) / GIGABYTE],
    ),
)
