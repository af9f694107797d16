"""The parts of the GPU check in the order in which they run, with their times (no torch).

A part is the module of the same name, which has a function `run(time, outcome)`. Parts of one wave run at the same time: they need the GPU
little, or not at all. A part that measures speed is alone in its wave, except for parts in the background, which take one core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Part:
    """says: what the part does. estimate_seconds: on one H100 with 16 cores. least_seconds: with less it cannot find out anything.

    limit_seconds: it is killed if it takes longer; a longer check gives it more. is_in_background: the next waves do not wait for it.
    is_needed: if it does not pass, nothing else runs. is_default: whether it runs if no parts are named.
    """

    name: str
    estimate_seconds: float
    least_seconds: float
    limit_seconds: float
    says: str
    is_in_background: bool = False
    is_needed: bool = False
    is_default: bool = True


Wave = tuple[Part, ...]

# The first command of benchmarks/gpu_half_hour.sh has the parts up to `speed`, the second those up to `sanitizer`.
WAVES: tuple[Wave, ...] = (
    (Part("machine", 5, 5, 150, "device, driver, versions, and whether the GPU computes", is_needed=True),),
    (Part("library", 40, 20, 300, "builds and loads the library of kernels"),),
    (
        Part("bits", 70, 15, 150, "every kernel against the reference, bit for bit"),
        Part("threads", 75, 15, 150, "ranks as threads on one GPU: equal bits in all stages, also with random delays on every stream"),
        Part("one_rank", 40, 15, 120, "a world of one against a plain torch model, and memory over 200 steps"),
        Part("features", 60, 15, 180, "compile, fp16, architectures, documents, kernels of attention"),
        Part(
            "builds",
            200,
            60,
            400,
            "8 builds at once, without ninja, with the list of architectures of a container",
            is_in_background=True,
            is_default=False,
        ),
    ),
    (Part("training", 65, 25, 180, "a GPT of a billion parameters: speed, parts of a step, stalls, memory against the plan"),),
    (Part("speed", 35, 15, 150, "every kernel beside a plain copy of the same bytes"),),
    (
        Part("nccl", 105, 30, 280, "4 NCCL ranks as 2 nodes x 2: equal bits in all stages, also of tensor and of context ranks"),
        Part("resume", 55, 20, 150, "save, --async-save, resume and evaluation: the same bits"),
        Part("lost_rank", 35, 30, 150, "one NCCL rank is killed, and the others end in time"),
    ),
    (Part("several_gpus", 60, 20, 200, "one rank per GPU: rates of the collectives, limits of CTAs"),),
    (Part("tensor", 15, 15, 120, "the tensor link over NCCL: bits of its sums, and sums beside matrix products"),),
    (Part("offload", 35, 20, 200, "optimizer and kept inputs on the host: losses, memory against the plan, copies beside computation"),),
    (Part("sanitizer", 20, 15, 300, "every kernel of codes and of the loss under compute-sanitizer", is_default=False),),
    (Part("script", 100, 30, 500, "the training script: 125M and 1.3B, speed and memory beside the plan, a trace", is_default=False),),
    (Part("counters", 30, 25, 500, "every kernel's hardware counters, by ncu", is_default=False),),
    (
        Part("apex", 20, 10, 300, "NVIDIA Apex, where it is or where its sources are", is_default=False),
        Part("compile", 40, 15, 200, "every CUDA source by itself, with warnings as errors", is_default=False),
    ),
)


def all_parts(waves: Sequence[Wave] = WAVES) -> dict[str, Part]:
    return {part.name: part for wave in waves for part in wave}


def chosen(names: Sequence[str] = (), *, on_cpu: bool = False, longer: float = 1.0) -> tuple[Wave, ...]:
    """The waves of the machine and of the parts with these names, in their own order; without names, of those that run by default.

    on_cpu: the parts run even if there is no GPU. longer: how many times their own limit they get.
    """

    def is_chosen(part: Part) -> bool:
        return part.is_needed or (part.name in names if names else part.is_default)

    waves = (
        [
            replace(part, limit_seconds=longer * part.limit_seconds, is_needed=part.is_needed and not on_cpu)
            for part in wave
            if is_chosen(part)
        ]
        for wave in WAVES
    )
    return tuple(tuple(wave) for wave in waves if wave)
