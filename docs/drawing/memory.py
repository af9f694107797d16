"""What each switch leaves on a GPU: Llama 2's 7 billion parameters on 8 GPUs of 24 GB (the example of docs/memory.md)."""

from __future__ import annotations

from functools import cache

from docs.drawing.canvas import Canvas, Theme
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.training.hardware import GIGABYTE
from megatron_zpp.training.members import PlannedWorld
from megatron_zpp.training.memory_need import MemoryNeed
from megatron_zpp.training.plan.kinds import ACTIVATIONS, COPY, GRADIENTS, KEPT_INPUTS, OPTIMIZER, WEIGHTS
from megatron_zpp.training.run_plan import RunPlan, plan_as_given

MODEL = """--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --seq-length 2048
    --max-position-embeddings 2048 --swiglu --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights
    --disable-bias-linear --vocab-size 32000 --ranks-per-node 8 --bf16 --hidden-dropout 0 --attention-dropout 0 --global-batch-size 64
    --mock-data --train-iters 1"""
RANKS, VOCABULARY, LIMIT, GIB = 8, 32000, 24 * GIGABYTE, 2**30
SWITCHES = (
    "--zero-stage 2",
    "--zero-stage 3",
    "--zero-stage 3 --checkpoint-activations",
    "--zero-stage 2 --checkpoint-activations --optimizer-cpu-offload",
    "--zero-stage 3 --optimizer-cpu-offload",
    "--zero-stage 3 --checkpoint-activations --optimizer-cpu-offload",
    "--zeropp paper --checkpoint-activations --optimizer-cpu-offload",
)
LEFT, TOP, ROW, HIGH, PIXELS_PER_GIB = 20, 76, 50, 22, 15


@cache
def plans() -> dict[str, MemoryNeed]:
    """The need of a rank, by the flags of each row of bytes in the page's example."""
    return {flags: plan_of(flags).memory for flags in SWITCHES}


def plan_of(flags: str) -> RunPlan:
    """The plan of the example's model on its node, with these flags."""
    config = resolve(parse_flags(f"{MODEL} {flags}".split()), RANKS, RANKS)
    return plan_as_given(config, PlannedWorld(1, RANKS, is_on_gpu=True), VOCABULARY)


def draw(theme: Theme) -> Canvas:
    needs = plans()
    canvas = Canvas(
        LEFT + 42 * PIXELS_PER_GIB + 200, TOP + len(needs) * ROW + 6, theme, "Memory of a rank by switch, 7 billion parameters on 8 GPUs"
    )
    canvas.text(14, 24, "Memory of one of 8 GPUs for 7 billion parameters, as planned", size=15, bold=True)
    canvas.legend(LEFT, 40, dict(zip(_parts(next(iter(needs.values()))), _colours(theme), strict=True)))
    limit = LEFT + LIMIT / GIB * PIXELS_PER_GIB
    canvas.line([(limit, TOP - 10), (limit, TOP + len(needs) * ROW - 4)], stroke=theme.inter, width=1.5, dashes="5 4")
    canvas.text(limit + 6, TOP - 2, "24 GB", size=12, fill=theme.inter)
    for index, (flags, need) in enumerate(needs.items()):
        _row(canvas, TOP + index * ROW, flags, need)
    return canvas


def _row(canvas: Canvas, y: float, flags: str, need: MemoryNeed) -> None:
    theme = canvas.theme
    canvas.text(LEFT, y + 12, flags, size=12, mono=True)
    x = float(LEFT)
    for nbytes, colour in zip(_parts(need).values(), _colours(theme), strict=True):
        width = nbytes / GIB * PIXELS_PER_GIB
        if width:
            canvas.rect(x, y + 18, max(0.5, width - 1), HIGH, fill=colour)
        x += width
    on_host = f" + {need.host / GIB:.1f} on the host" if need.host else ""
    canvas.text(LEFT + 42 * PIXELS_PER_GIB, y + 34, f"{need.total / GIB:.1f} GiB{on_host}", size=12.5, bold=need.total <= LIMIT)


def _parts(need: MemoryNeed) -> dict[str, int]:
    states = {"weights": need.of(WEIGHTS, COPY), "gradients": need.of(GRADIENTS), "moments": need.of(OPTIMIZER)}
    activations = need.of(ACTIVATIONS, KEPT_INPUTS)
    known = sum(states.values()) + activations + need.device.total
    return {**states, "activations": activations, "units and payloads under way": need.total - known, "CUDA and NCCL": need.device.total}


def _colours(theme: Theme) -> tuple[str, ...]:
    return theme.intra, theme.gradient, theme.slices[1], theme.slices[2], theme.slices[3], theme.compute
