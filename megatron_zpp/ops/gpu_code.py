"""Which GPUs run code that was compiled for some architectures. A kernel without such code fails only when it is started."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_zpp.ops.build import ARCHITECTURES_VARIABLE, OLDEST_ARCHITECTURE, number_of, present_capabilities

Capability = tuple[int, int]


def runs_on(architecture: str, capability: Capability) -> bool:
    """Whether a GPU of this compute capability runs code for the architecture, which is named as in TORCH_CUDA_ARCH_LIST.

    It runs code of its major number and of its minor number or a lower one, but with suffix a only its own. From PTX of a lower number, of
    any major one, its driver makes such code, unless it has a suffix. Source: NVIDIA's CUDA C++ Programming Guide, chapter 3.1.
    """
    name, own = architecture.removesuffix("+PTX"), number_of(architecture)
    if name.endswith("a"):
        return own == capability
    is_for_all_above = name != architecture and not name.endswith("f")
    return own <= capability and (own[0] == capability[0] or is_for_all_above)


def gpus_without_code(architectures: Sequence[str], capabilities: Sequence[Capability]) -> dict[int, Capability]:
    """The GPUs that run no code of these architectures, by index.

    capabilities: of each GPU. Those that are too old for the kernels are left out if others are there, which the kernels are meant for.
    """
    usable = {gpu: capability for gpu, capability in enumerate(capabilities) if capability >= OLDEST_ARCHITECTURE}
    meant = usable or dict(enumerate(capabilities))
    return {gpu: capability for gpu, capability in meant.items() if not any(runs_on(name, capability) for name in architectures)}


def why_not_for_all_gpus(architectures: Sequence[str]) -> str:
    """Which GPUs of this machine run no code of these architectures, and what to do; empty if all run it, or none is here."""
    lacking = gpus_without_code(architectures, present_capabilities())
    if not lacking:
        return ""
    gpus = ", ".join(f"GPU {gpu} ({_text(capability)})" for gpu, capability in lacking.items())
    to_add = [_text(capability) for capability in sorted(set(lacking.values())) if capability >= OLDEST_ARCHITECTURE]
    remedy = f"add {' '.join(to_add)} to it" if to_add else f"the kernels need GPUs from {_text(OLDEST_ARCHITECTURE)} on"
    return f"{ARCHITECTURES_VARIABLE} names {' '.join(architectures)}, and {gpus} does not run such code; {remedy}."


def _text(capability: Capability) -> str:
    return "{}.{}".format(*capability)
