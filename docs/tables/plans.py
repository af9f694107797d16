"""Tables of what is planned, and of what plans of time assume."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path

from benchmarks.report import in_table
from docs.drawing.memory import LIMIT, plan_of, plans
from docs.drawing.quickstart import recorded
from megatron_zpp.comm.code import EXACT, Code, SliceShape
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.counted import in_gib
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config
from megatron_zpp.data.tokenizers.tokenizer import padded_vocab_size
from megatron_zpp.model.flops import hardware_flops
from megatron_zpp.outer.options import OuterOptions
from megatron_zpp.training.hardware import CONSTANTS, GIGABYTE, TERA, planned_machine
from megatron_zpp.training.members import MEMBERS, PlannedWorld
from megatron_zpp.training.plan.kinds import ACTIVATIONS, GATHERED, GRADIENTS, KEPT_INPUTS, OPTIMIZER, OTHER, PAYLOADS, WEIGHTS
from megatron_zpp.training.run_plan import RunPlan, plan_as_given, plan_run
from megatron_zpp.training.sharding import checkpoint_bytes, grid_of, saved_between_nodes

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


# ---- Llama 3.1 8B


def llama(flags: str) -> Config:
    """The flags of the shape and others."""
    script = (ROOT / "scripts" / "models" / "llama3.1_8b.sh").read_text(encoding="utf-8")
    (model,) = re.findall(r"MODEL_ARGS=\((.*?)\)", script, re.DOTALL)
    return parse_flags(
        shlex.split(f"{model} --vocab-size {LLAMA_VOCABULARY} --mock-data --train-iters 1 --bf16 --ranks-per-node 8 {flags}")
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


def recomputed() -> str:
    """One sample of 8192 tokens, stage 3 on two nodes of 8."""
    lines, least = [], 0
    for name, flags in RECOMPUTED.items():
        config = resolve(llama(f"--zero-stage 3 --micro-batch-size 1 --global-batch-size 16 {flags}"), 16, 8)
        need = plan_as_given(config, PlannedWorld(2, 8, is_on_gpu=True), LLAMA_VOCABULARY).memory
        operations = hardware_flops(config.model, LLAMA_VOCABULARY, 1, micro_batch_size=1)
        least = least or operations
        lines.append([name, in_gib(need.of(ACTIVATIONS)), in_gib(need.of(GATHERED)), f"{operations / least:.2f}"])
    return in_table(["recomputed in the blocks", "activations", "full units at once", "operations"], lines)


LONG_WORLD = PlannedWorld(4, 8, is_on_gpu=True)
LONG_MEMBERS = ("ZeRO-1", "ZeRO-3", "ZeRO++", "lean-1")
LONG_SIZES = ((1, 8), (1, 16), (2, 4), (4, 2), (8, 1))  # T and C


def long_flags(tensor_ranks: int, context_ranks: int, tokens: int = 131072, samples: int = 4) -> Config:
    sizes = f"--tensor-model-parallel-size {tensor_ranks} --context-parallel-size {context_ranks}"
    given = llama(f"--checkpoint-activations --global-batch-size {samples} {sizes}")
    return given.with_values(seq_length=tokens, max_position_embeddings=tokens)


@cache
def long_plans(tensor_ranks: int, context_ranks: int) -> dict[str, RunPlan]:
    flags = long_flags(tensor_ranks, context_ranks)
    return {one.name: plan_run(flags, one, LONG_WORLD, LLAMA_VOCABULARY) for one in MEMBERS if one.name in LONG_MEMBERS}


def long_seconds(plan: RunPlan) -> float:
    return plan.time(planned_machine(400, 100, 400 * TERA, is_on_gpu=True)).seconds


def long_memory() -> str:
    kinds = {
        "weights": (WEIGHTS,),
        "gradients": (GRADIENTS,),
        "optimizer": (OPTIMIZER,),
        "buffers": (PAYLOADS, OTHER),
        "activations": (ACTIVATIONS, KEPT_INPUTS),
    }
    lines = []
    for name, plan in long_plans(1, 8).items():
        parts = [*(plan.memory.of(*some) for some in kinds.values()), plan.memory.total]
        lines.append([name, *(f"{part / GIB:.1f}" for part in parts), _whether(plan.memory.total <= 80 * GIGABYTE)])
    return in_table(["memory per rank in GiB", *kinds, "total", "fits"], lines)


def long_traffic() -> str:
    lines = [
        [name, *(f"{number:.4g}" for number in (plan.node_bytes / GIGABYTE, plan.rank_bytes / GIGABYTE, long_seconds(plan)))]
        for name, plan in long_plans(1, 8).items()
    ]
    return in_table(["", "GB into a node", "GB into a rank inside its node", "seconds"], lines)


def long_sizes() -> str:
    """Each pair of T and C with its fastest member."""
    lines = []
    for sizes in LONG_SIZES:
        plan = min(long_plans(*sizes).values(), key=long_seconds)
        moved = (plan.tensor_bytes / GIGABYTE, plan.exchanges.context_bytes / GIGABYTE)
        cells = [*map(str, sizes), plan.member.name, str(plan.microbatches), *(f"{nbytes:.4g}" for nbytes in moved)]
        lines.append([*cells, in_gib(plan.memory.total), f"{long_seconds(plan):.4g}"])
    header = ["T", "C", "member", "micro-batches", "GB over the tensor link", "GB over the context link", "memory per rank", "seconds"]
    return in_table(header, lines)


def long_samples() -> str:
    """Whole samples on a rank, and longer ones on more ranks: memory of a rank with ZeRO-3."""
    zero3 = next(member for member in MEMBERS if member.name == "ZeRO-3")
    cases = {"128K, C = 1": long_flags(1, 1, samples=32), "128K, C = 8": long_flags(1, 8), "256K, C = 16": long_flags(1, 16, 2 * 131072)}
    needs = {name: plan_run(flags, zero3, LONG_WORLD, LLAMA_VOCABULARY).memory for name, flags in cases.items()}
    lines = [[name, in_gib(need.of(ACTIVATIONS)), in_gib(need.total)] for name, need in needs.items()]
    return in_table(["tokens of a sample", "activations", "memory per rank"], lines)


def saves() -> str:
    """What a save of lean sends into one of two nodes, and how long the link is busy with it."""
    rates = (1, 10, 100)
    lines = []
    places = {
        "one of the two nodes": "",
        "each node (`--node-local-checkpoints`)": "--node-local-checkpoints",
        "each node, with copies (and `--save-copies 2`)": "--node-local-checkpoints --save-copies 2",
    }
    for place, flag in places.items():
        config = resolve(llama(f"--zeropp lean --micro-batch-size 1 --global-batch-size 16 --save unwritten {flag}"), 16, 8)
        of = (config, grid_of(config, 16), LLAMA_VOCABULARY)
        whole, crossing = checkpoint_bytes(*of), saved_between_nodes(*of)
        seconds = (f"{crossing * 8 / (rate * GIGABYTE):.4g} s" for rate in rates)
        lines.append([place, f"{whole / GIGABYTE:.4g} GB", f"{crossing / GIGABYTE:.4g} GB", *seconds])
    return in_table(["the disk is that of", "checkpoint", "into a node", *(f"at {rate} Gbit/s" for rate in rates)], lines)


# ---- 7 billion parameters on 8 GPUs of 24 GB


def switches() -> str:
    lines = [[f"`{flags}`", in_gib(need.total), in_gib(need.host), _whether(need.total <= LIMIT)] for flags, need in plans().items()]
    return in_table(["flags beside `--bf16`", "device, per rank", "host, per rank", "fits"], lines)


RECOMPUTES, OFFLOADS = "--checkpoint-activations", "--optimizer-cpu-offload"
TIMED = (
    ("", 1),
    (RECOMPUTES, 2),
    (OFFLOADS, 1),
    (f"{RECOMPUTES} {OFFLOADS}", 1),
    (f"{RECOMPUTES} {OFFLOADS}", 8),
    (f"{RECOMPUTES} {OFFLOADS} --checkpoint-in-cpu", 8),
)


def timed_switches() -> str:
    lines = []
    for flags, samples in TIMED:
        plan = plan_of(f"--zero-stage 3 --micro-batch-size {samples} {flags}")
        time = plan.time(planned_machine(100, 100, 80 * TERA, is_on_gpu=True))
        device = in_gib(plan.memory.total) + ("" if plan.memory.total <= LIMIT else ", does not fit")
        lines.append([_code(flags), str(samples), device, f"{time.host:.1f}", f"{time.seconds:.1f}"])
    header = ["flags beside `--bf16 --zero-stage 3`", "samples per micro-batch", "device, per rank"]
    return in_table([*header, "AdamW on the host, s", "step, s"], lines)


DIVIDES = "--tensor-model-parallel-size 4"
KEPT = (
    "",
    "--checkpoint-in-cpu",
    DIVIDES,
    f"{DIVIDES} --partition-activations",
    f"{DIVIDES} --partition-activations --checkpoint-in-cpu",
    f"{DIVIDES} --sequence-parallel",
)


def kept_inputs() -> str:
    lines = []
    for flags in KEPT:
        need = plan_of(f"--micro-batch-size 8 --zero-stage 3 --checkpoint-activations {flags}").memory
        lines.append([_code(flags), in_gib(need.of(ACTIVATIONS)), in_gib(need.host)])
    return in_table(["more flags", "activations on the device", "on the host"], lines)


# ---- The quickstart, the tutorial


def of_quickstart() -> str:
    """The plan of the quickstart's model on two nodes of two, and the loss that it logged."""
    script = (ROOT / "scripts" / "quickstart.sh").read_text(encoding="utf-8")
    (model,) = re.findall(r"^MODEL=\((.*?)\)$", script, re.MULTILINE)
    (vocabulary,) = re.findall(r"VOCAB_SIZE=(\d+)", script)
    run = f"{model} --vocab-size {vocabulary} --bf16 --mock-data --train-iters 1 --lr 1 --global-batch-size 32 --micro-batch-size 8"
    lines: list[list[str]] = []
    zero3_bytes = 0.0
    for name, flags in (("ZeRO-3", "--zero-stage 3"), ("ZeRO++", "--zeropp paper"), ("lean", "--zeropp lean")):
        plan = plan_as_given(resolve(parse_flags(f"{run} {flags}".split()), 4, 2), PlannedWorld(2, 2, is_on_gpu=False), int(vocabulary))
        zero3_bytes = zero3_bytes or plan.node_bytes
        share = "" if name == "ZeRO-3" else f" ({plan.node_bytes / zero3_bytes:.3f} of it)"
        loss = recorded()["compared"][name]["losses"]["12"]
        figures = [f"{nbytes / 1e6:.2f}" for nbytes in (plan.node_bytes, plan.rank_bytes, plan.memory.states)]
        lines.append([name, figures[0] + share, *figures[1:], f"{loss:.3f}"])
    return in_table(["run", "MB into a node", "MB into a rank inside its node", "state, MB per rank", "loss after 12 iterations"], lines)


def of_tutorial() -> str:
    """What a rank needs under the command of DeepSpeed's tutorial."""
    page = (ROOT / "docs" / "coming_from_deepspeed.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^python pretrain_zeropp_gpt.py (.*?)```", page, re.DOTALL | re.MULTILINE)
    lines = []
    for name, nodes, ranks, is_on_gpu in (("one process on a CPU", 1, 1, False), ("4 nodes of 16 GPUs", 4, 16, True)):
        config = resolve(parse_flags(shlex.split(command.replace("\\\n", " "))), nodes * ranks, ranks)
        vocabulary = padded_vocab_size(config.data.vocab_size or 1, config.model.make_vocab_size_divisible_by)
        need = plan_as_given(config, PlannedWorld(nodes, ranks, is_on_gpu=is_on_gpu), vocabulary).memory
        lines.append([name, in_gib(need.total), in_gib(need.device.total)])
    return in_table(["world", "memory per rank", "of it CUDA and NCCL, estimated"], lines)


# ---- What plans of time assume

UNITS = {1e-6: "µs", 1e-9: "ns", 1e-12: "ps"}


def assumed() -> str:
    lines = []
    for constant in CONSTANTS:
        unit = next(unit for unit in UNITS if constant.seconds >= 0.05 * unit)
        time = f"{constant.seconds / unit:.4g} {UNITS[unit]}"
        lines.append([constant.device, constant.name, constant.of, constant.source, time])
    return in_table(["device", "work", "of a", "from", "time"], lines, words=4)


def _whether(holds: bool) -> str:
    return "yes" if holds else "no"


def _code(flags: str) -> str:
    return f"`{flags}`" if flags else "none"


# ---- islands


OUTER = OuterOptions()
LARGE_SLICE = SliceShape(1 << 24, 0)  # so large that padding and exact values are nothing
OUTER_CODES = {
    "3 bits both ways": (OUTER.gradient_code, OUTER.difference_code),
    "3 bits, changes in 1": (OUTER.gradient_code, Code.gaussian(1, rounds=1)),
    "16 bits": (EXACT, EXACT),
}


def islands_bytes() -> str:
    """What enters a node per step, as a part of the model in 16 bits, without the factor (N - 1)/N."""
    whole = EXACT.payload_bytes(LARGE_SLICE, element_bytes=2)
    lines = []
    for period in (8, 16, 32, 64):
        shares = (sum(code.payload_bytes(LARGE_SLICE, element_bytes=2) for code in codes) / whole for codes in OUTER_CODES.values())
        lines.append([f"{period}", *(f"{share / period:.4f}" for share in shares)])
    return in_table(["H", *OUTER_CODES], lines)


TABLES: dict[str, Callable[[], str]] = {
    "islands_bytes": islands_bytes,
    "recomputed": recomputed,
    "kept_inputs": kept_inputs,
    "saves": saves,
    "long_memory": long_memory,
    "long_traffic": long_traffic,
    "long_sizes": long_sizes,
    "long_samples": long_samples,
    "switches": switches,
    "timed_switches": timed_switches,
    "quickstart": of_quickstart,
    "tutorial": of_tutorial,
    "assumed": assumed,
}
