"""The parts of the GPU check in the order in which they run, with their times (no torch).

A part is the module of the same name, which has a function `run(time, outcome)`. Parts of one wave run at the same time: they need the GPU
little, or not at all. A part that measures speed is alone in its wave, except for parts in the background, which take one core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Part:
    """says: what the part does. estimate_seconds: on one H200 with 16 cores. least_seconds: with less it cannot find out anything.

    limit_seconds: it is killed if it takes longer; a longer check gives it more. is_in_background: the next waves do not wait for it.
    """

    name: str
    estimate_seconds: float
    least_seconds: float
    limit_seconds: float
    says: str
    is_in_background: bool = False


Wave = tuple[Part, ...]

WAVES: tuple[Wave, ...] = (
    (
        Part("machine", 10, 5, 60, "device, driver, versions"),
        Part("library", 60, 20, 240, "builds and loads the library of kernels"),
    ),
    (
        Part("ladder", 50, 15, 170, "ranks as threads on one GPU: equal bits in all stages, also with random delays on every stream"),
        Part(
            "builds", 200, 60, 400, "8 builds at once, without ninja, with the list of architectures of a container", is_in_background=True
        ),
    ),
    (Part("training", 75, 25, 180, "a GPT of a billion parameters: speed, parts of a step, stalls, memory against the plan"),),
    (
        Part("bits", 60, 15, 200, "every kernel against the reference, bit for bit"),
        Part("nccl", 100, 30, 280, "4 NCCL ranks as 2 nodes x 2: equal bits in all stages, also of tensor and of context ranks"),
    ),
    (Part("speed", 40, 15, 150, "every kernel beside a plain copy of the same bytes"),),
    (
        Part("one_rank", 30, 15, 120, "a world of one against a plain torch model, and memory over 200 steps"),
        Part("features", 45, 15, 180, "compile, fp16, architectures, documents, kernels of attention"),
        Part("resume", 40, 20, 150, "save, --async-save, resume and evaluation: the same bits"),
    ),
    (Part("several_gpus", 60, 20, 200, "one rank per GPU: rates of the collectives, limits of CTAs"),),
    (Part("tensor", 15, 15, 120, "the tensor link over NCCL: bits of its sums, and sums beside matrix products"),),
    (
        Part("lost_rank", 80, 75, 150, "one NCCL rank is killed, and the others end in time"),
        Part("offload", 70, 20, 200, "optimizer and kept inputs on the host: losses, memory against the plan, copies beside computation"),
        Part("apex", 20, 10, 300, "NVIDIA Apex, where it is or where its sources are"),
        Part("compile", 40, 15, 200, "every CUDA source by itself, with warnings as errors"),
    ),
)


def all_parts(waves: Sequence[Wave] = WAVES) -> dict[str, Part]:
    return {part.name: part for wave in waves for part in wave}


def chosen(names: Sequence[str], *, longer: float = 1.0) -> tuple[Wave, ...]:
    """The waves of the parts with these names, in their own order. longer: how many times their own limit they get."""
    waves = ([replace(part, limit_seconds=longer * part.limit_seconds) for part in wave if part.name in names] for wave in WAVES)
    return tuple(tuple(wave) for wave in waves if wave)
