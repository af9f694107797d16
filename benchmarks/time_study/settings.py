"""What the study of time to loss compares: FSDP2, the rows of ZeRO, lean with larger batches, and islands, with learning rates to try."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.slow_links.configurations import ALL, FSDP2, LEAN, ZERO3, Workload

MODEL = (
    "--num-layers 7 --hidden-size 640 --num-attention-heads 10 --seq-length 256 --vocab-size 256 --position-embedding-type rope "
    "--init-method-std 0.04"
)
SMOKE_MODEL = "--num-layers 1 --hidden-size 576 --num-attention-heads 9 --seq-length 16 --vocab-size 256"
OPTIMIZER = "--weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0"
SAMPLES_PER_RANK = 4  # in a micro-batch
WARMUP_STEPS = 16  # of any batch: with fewer, large ones lose more in their first steps than they gain
WHOLE_NODES = "--zero-stage 2"  # with one rank per node, stage 3 would gather weights that the rank has
LEAN_FLAGS = f"{WHOLE_NODES} --zeropp lean"
NEVER = 1_000_000
RATES = (2.5e-4,)  # the best of lean and of islands with H = 16, which were trained with its half or double, too
MEANS = "islands, plain means"


@dataclass(frozen=True)
class Timed:
    """Steps of one kind. period: steps after which they repeat."""

    name: str
    flags: list[str]
    period: int


@dataclass(frozen=True)
class Setting:
    """One way to train.

    flags: of the training script, after those of stage 3. batch: times the samples of a step. period: iterations between exchanges of
    islands, else 1. length: times the tokens of the shortest runs, for ways that send less per token. learning_rates: those to try.
    """

    name: str
    flags: str = ""
    batch: int = 1
    period: int = 1
    length: int = 1
    learning_rates: tuple[float, ...] = RATES

    @property
    def has_islands(self) -> bool:
        return self.period > 1

    def workload(self, world: Workload) -> Workload:
        """The world of the study with this batch."""
        return replace(world, microbatches=self.batch)

    def training_flags(self, world: Workload, learning_rate: float) -> list[str]:
        """The flags of a run whose loss counts: a constant rate after the warm-up, where outer steps begin."""
        return self._flags(world, f"--lr {learning_rate} --lr-warmup-iters {WARMUP_STEPS}")

    def timed(self, world: Workload) -> Iterator[Timed]:
        """The steps whose time counts; of islands also those before the first outer step, in which they take means."""
        if self.has_islands:
            yield Timed(MEANS, self._flags(world, f"--diloco-start-iteration {NEVER}"), 1)
        yield Timed(self.name, self._flags(world, "--diloco-start-iteration 0" if self.has_islands else ""), self.period)

    def _flags(self, world: Workload, more: str) -> list[str]:
        return [*self.workload(world).flags(ZERO3), *OPTIMIZER.split(), *self.flags.split(), *more.split()]


def _islands(period: int, learning_rates: tuple[float, ...] = RATES, *, is_late: bool = False) -> Setting:
    flags = f"{WHOLE_NODES} --diloco-sync-period {period} --diloco-overlap-steps {int(is_late)}"
    name = f"islands, H = {period}" + ", one step late" * is_late
    return Setting(name, flags, period=period, length=2, learning_rates=learning_rates)


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting(FSDP2),
        Setting(ZERO3),
        Setting(ALL, "--zeropp paper"),
        Setting(LEAN, LEAN_FLAGS, learning_rates=(1.25e-4, 2.5e-4, 5e-4)),
        Setting(f"{LEAN}, 4 x the batch", LEAN_FLAGS, batch=4, length=2, learning_rates=(5e-4, 1e-3)),
        Setting(f"{LEAN}, 8 x the batch", LEAN_FLAGS, batch=8, length=2, learning_rates=(5e-4, 1e-3)),
        _islands(8),
        _islands(16, (1.25e-4, 2.5e-4, 5e-4)),
        _islands(16, is_late=True),
        _islands(32),
    )
}
