"""Flags of ZeRO and ZeRO++."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zpp.config.flag import COUNT, LARGEST_WIDTH, POSITIVE_RANKS, Bounds, flag, needs

WORKING_DTYPE_BITS = 16  # a number of bits that means no quantization, even if the working dtype is fp32
# Those of ops/payload.py, which this room does not see; a test compares them.
BLOCK_BITS = (4, 8)
GAUSSIAN_BITS = (1, 2, 3, 4)


@dataclass(frozen=True)
class ZeroConfig:
    """Sharding and quantization: ZeRO and ZeRO++."""

    zero_stage: int = flag(
        0,
        help="What is sharded: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too.",
        allowed=(0, 1, 2, 3),
        shorthands=(("--use-distributed-optimizer", 1),),
    )
    deepspeed_config: str | None = flag(
        None,
        help="DeepSpeed JSON file; its keys set the flags that they correspond to.",
        unit="path",
        aliases=("--deepspeed_config", "--deepscale_config"),
    )
    zeropp: str | None = flag(
        None,
        help="A set of ZeRO++ flags. paper: --zero-stage 3 with qwZ, hpZ over the ranks of a node, and qgZ. lean: quantized weight "
        "differences and the Gaussian code for gradients, in --zero-stage 3 (with hpZ over the ranks of a node), 1 or 2.",
        allowed=("paper", "lean"),
    )
    zero_quantized_weights: bool = flag(False, help="qwZ: weights cross links as blocks of integers; needs --zero-stage 1, 2 or 3.")
    zero_hpz_partition_size: int = flag(
        1,
        help="hpZ: ranks of a partition; each partition holds a secondary copy of the weights, so that gathers in backward stay inside it. "
        "Usually the ranks of a node, where ranks that share layers count as one; 1 turns it off; needs --zero-stage 3.",
        unit="ranks",
        allowed=POSITIVE_RANKS,
    )
    zero_quantized_gradients: bool = flag(False, help="qgZ: gradients cross links as blocks of integers; needs --zero-stage 1, 2 or 3.")
    zero_quantized_weights_bits: int = flag(
        8, help="Bits of a weight under --zero-quantized-weights.", unit="bits", allowed=BLOCK_BITS, needs=needs("zero_quantized_weights")
    )
    zero_quantized_weight_differences: bool = flag(
        False,
        help="Every partition keeps a copy of the weights across steps, and only quantized differences cross between partitions; needs "
        "--zero-stage 1 or 2, or 3 with --zero-hpz-partition-size.",
    )
    zero_quantized_weight_differences_bits: int = flag(
        3,
        help="Bits of a weight's difference under --zero-quantized-weight-differences.",
        unit="bits",
        allowed=GAUSSIAN_BITS,
        needs=needs("zero_quantized_weight_differences"),
    )
    zero_quantized_gradients_code: str = flag(
        "absmax",
        help="Code of gradients. absmax: even steps up to the largest value of a block. gaussian: blocks of 256 are rotated, and levels "
        "are placed for a Gaussian with an unbiased scale; between partitions only, inside them INT8.",
        allowed=("absmax", "gaussian"),
        needs=needs("zero_quantized_gradients"),
    )
    zero_quantized_gradients_intra_bits: int = flag(
        None,
        help="Bits of a gradient between the ranks of one partition (a node, or a group of --zero-hpz-partition-size ranks) under "
        "--zero-quantized-gradients; 16 is the working precision.",
        unit="bits",
        allowed=(*BLOCK_BITS, WORKING_DTYPE_BITS),
        otherwise="4, or 8 with --zero-quantized-gradients-code gaussian",
        needs=needs("zero_quantized_gradients"),
    )
    zero_quantized_gradients_inter_bits: int = flag(
        None,
        help="Bits of a gradient between partitions under --zero-quantized-gradients; 16 is the working precision.",
        unit="bits",
        allowed=(*sorted({*GAUSSIAN_BITS, *BLOCK_BITS}), WORKING_DTYPE_BITS),
        otherwise="4, or 3 with --zero-quantized-gradients-code gaussian",
        needs=needs("zero_quantized_gradients"),
    )
    zero_quantized_gradients_rotation: str = flag(
        "none",
        help="Transform of 32 neighbouring gradients before they are quantized; it spreads outliers and adds no bytes.",
        allowed=("none", "hadamard"),
        needs=needs("zero_quantized_gradients"),
    )
    zero_quantized_gradients_rounding: str = flag(
        "nearest",
        help="Rounding of quantized gradients: to the nearest code, or up or down at random so that the mean error is 0.",
        allowed=("nearest", "stochastic"),
        needs=needs("zero_quantized_gradients"),
    )
    zero_gradients_between_microbatches: str = flag(
        None,
        help="Where the gradients of a step's micro-batches are added up. primary: every micro-batch is sent to the owner of a slice. "
        "secondary: they are added up inside each partition and sent between partitions once per step, which takes 4 bytes per parameter "
        "divided by the ranks of a partition; needs --zero-stage 2 or 3.",
        allowed=("primary", "secondary"),
        otherwise="primary, or secondary with --zeropp lean, --zero-stage 2 or 3 and several micro-batches per step",
    )
    zero_full_precision_iters: int = flag(
        0,
        help="Number of iterations at the start of the run in which nothing is quantized.",
        unit="iterations",
        allowed=COUNT,
        needs=needs("zero_quantized_weights", "zero_quantized_weight_differences", "zero_quantized_gradients", "diloco_sync_period"),
    )
    quantization_block_size: int = flag(
        256,
        help="Neighbouring values that share a scale; every rank's slice of a unit is padded to whole blocks.",
        unit="values",
        allowed=Bounds(at_least=32, multiple_of=32, limit=LARGEST_WIDTH),
    )
    optimizer_cpu_offload: bool = flag(
        False,
        help="Main weights and Adam's moments are kept and updated in the memory of the host, all cores of a node divided among its ranks; "
        "on the device stay 4 bytes per owned parameter, and working weights. Needs --zero-stage 1, 2 or 3.",
        aliases=("--cpu-optimizer", "--cpu-offload"),
    )
    zero_prefetch_units: int = flag(
        2, help="How many units ahead of need are gathered over the link between partitions.", unit="units", allowed=COUNT
    )
    zero_prefetch_units_intra: int = flag(
        1, help="How many units ahead of need are gathered over the link inside a partition.", unit="units", allowed=COUNT
    )

    @property
    def quantizes(self) -> bool:
        """Whether anything crosses a link as quantized values."""
        return self.zero_quantized_weights or self.zero_quantized_weight_differences or self.zero_quantized_gradients
