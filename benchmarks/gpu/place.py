"""The device on which a part runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.gpu.outcome import NotDone, Outcome


@dataclass(frozen=True)
class Place:
    """A device. is_tiny: sizes are such that a CPU takes seconds; what is measured means nothing then."""

    device: torch.device
    is_tiny: bool

    @classmethod
    def here(cls) -> Place:
        """The first GPU of this machine; without one the CPU."""
        if torch.cuda.is_available():
            torch.cuda.set_device(0)
            return cls(torch.device("cuda", 0), is_tiny=False)
        return cls(torch.device("cpu"), is_tiny=True)

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Returns once the device has done its work."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def free_bytes(self) -> int:
        """Free memory of the GPU; 0 without one."""
        return int(torch.cuda.mem_get_info(self.device)[0]) if self.is_gpu else 0


def require_gpu(place: Place) -> None:
    """Raises NotDone if the place is not a GPU."""
    if not place.is_gpu:
        built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs alone"
        raise NotDone(f"torch finds no GPU here (torch {torch.__version__} is built for {built_for})")


def load_kernels(place: Place, outcome: Outcome) -> None:
    """Loads the kernels, as a run does. Without those of the loss, says on a GPU that it is not measured with them."""
    from megatron_zpp.ops import extension

    extension.load()
    if place.is_gpu and not extension.has_loss_kernels_for("cuda"):
        outcome.omit(f"the loss on kernels: {extension.report('cuda')}")


def require_kernels(place: Place) -> None:
    """Loads the kernels for this type of device, or raises NotDone."""
    from megatron_zpp.ops import extension

    extension.load()
    if not extension.has_kernels_for(place.device.type):
        raise NotDone(f"no kernels for {place.device.type} are built: {extension.report(place.device.type)}")
