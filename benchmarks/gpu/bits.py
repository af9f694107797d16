"""Compares the bits of every CUDA kernel with those of the reference on the CPU, on ordinary, extreme and awkward inputs.

A difference is a failure that says where the bits differ. The first eight of each kernel are named, and the others counted.
"""

from __future__ import annotations

import time as clock
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu import long_runs
from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.device_errors import attempt, is_fatal
from benchmarks.gpu.outcome import Outcome
from benchmarks.gpu.place import Place, require_kernels
from megatron_zpp.ops import extension, reference
from testbed.kernels import dropout_bits, gaussian_bits, kernel_bits, mean_bits, softmax_errors
from testbed.kernels.bit_differences import Comparison, Ops
from testbed.kernels.calls import Call
from testbed.kernels.kernel_bits import BITS, DTYPES, decoded, encoded

SIZES = ((32, 300), (96, 45), (256, 70), (992, 5), (1056, 3), (8224, 2), (32800, 1))  # a team cannot hold the last, and reads it twice
# The kernels of the registry that are compared here; another one has no check yet.
CHECKED = (
    *extension.LOSS_OPS,
    "encode_blocks",
    "decode_blocks",
    "decode_mean_blocks",
    "recode_mean_blocks",
    "mean_values",
    "encode_gaussian",
    "decode_gaussian",
    "decode_mean_gaussian",
    "drop_values",
)
GAUSSIAN_BLOCKS = (5, 33)
CHECK_SECONDS = 3.0  # below which no further check is begun
OF_REFERENCE, OF_PARTS = "equal the reference's bit for bit", "equal those of parts bit for bit"
OF_LOSS = "are within rounding of fp64, with the same bits at any place"


class Check(NamedTuple):
    """Compares results, and says what holds of them if none differs."""

    name: str
    holds: str
    compare: Callable[[], None]


def run(time: Deadline, outcome: Outcome) -> None:
    place = Place.here()
    require_kernels(place)
    for op in (*extension.OPS, *extension.LOSS_OPS):
        if op not in CHECKED:
            outcome.omit(f"the kernel {op}: no check of its bits is written here")
    if not extension.has_loss_kernels_for(place.device.type):
        outcome.omit("the kernels of the loss: they are for GPUs only")
    if not place.is_gpu:
        outcome.omit("the CUDA kernels, and more than 2^31 values: torch finds no GPU here; the C++ kernels were checked instead")
    comparison = Comparison(device=place.device.type, report=partial(outcome.check, holds=False), is_fatal=is_fatal)
    try:
        for check in _checks(comparison, place):
            if not time.has(CHECK_SECONDS):
                outcome.ran_late(check.name)
                continue
            start = clock.monotonic()
            attempt(outcome, check.name, partial(_run_check, outcome, comparison, check))
            outcome.measure(**{f"seconds of {check.name}": round(clock.monotonic() - start, 1)})
            if place.is_gpu:
                torch.cuda.empty_cache()
    finally:
        outcome.say(*filter(None, [comparison.more()]))


def _checks(comparison: Comparison, place: Place) -> Iterator[Check]:
    for block_numel, blocks in SIZES[:2] if place.is_tiny else SIZES:
        yield Check(f"{blocks} blocks of {block_numel}", OF_REFERENCE, partial(_check_size, comparison, block_numel, blocks))
    yield Check("dropout", OF_REFERENCE, partial(dropout_bits.check, comparison))
    yield Check("means", OF_REFERENCE, partial(mean_bits.check, comparison))
    gaussian_blocks = GAUSSIAN_BLOCKS[:1] if place.is_tiny else GAUSSIAN_BLOCKS
    yield Check("Gaussian codes", OF_REFERENCE, partial(_check_gaussian, comparison, gaussian_blocks))
    yield Check("rows at odd places", OF_REFERENCE, partial(_check_gaps, comparison))
    yield Check("all 16-bit values", OF_REFERENCE, partial(_check_all_16_bit_values, comparison))
    yield from _long_checks(comparison, is_tiny=place.is_tiny)
    yield Check("many slices", OF_REFERENCE, partial(_check_many_slices, comparison))
    if extension.has_loss_kernels_for(place.device.type):
        yield Check("the loss", OF_LOSS, partial(softmax_errors.check, comparison))
    if place.is_gpu:
        yield Check("the reference on the GPU", OF_REFERENCE, partial(_check_reference_on_gpu, comparison))


def _long_checks(comparison: Comparison, *, is_tiny: bool) -> Iterator[Check]:
    numels = (long_runs.TINY_NUMEL, long_runs.TINY_PART_NUMEL) if is_tiny else (long_runs.LONG_NUMEL, long_runs.PART_NUMEL)
    long = long_runs.Long(comparison, *numels)
    for name, compare in long_runs.CHECKS.items():
        yield Check(f"{name} of {long.numel:,} values", OF_PARTS, partial(compare, long))


def _run_check(outcome: Outcome, comparison: Comparison, check: Check) -> None:
    compared, differing = comparison.compared, comparison.differing.total()
    check.compare()
    compared, differing = comparison.compared - compared, comparison.differing.total() - differing
    if differing:
        outcome.say(f"{check.name}: {compared} results, with {differing} differences")
    else:
        outcome.check(f"{check.name}: {compared} results {check.holds}", holds=True)


def _check_size(comparison: Comparison, block_numel: int, blocks: int) -> None:
    kernel_bits.check_all(comparison, block_numel, blocks)
    kernel_bits.check_options(comparison, block_numel, blocks)


def _check_gaussian(comparison: Comparison, numbers_of_blocks: Sequence[int]) -> None:
    for blocks in numbers_of_blocks:
        gaussian_bits.check_values(comparison, blocks)
        gaussian_bits.check_any_payloads(comparison, blocks)


def _check_all_16_bit_values(comparison: Comparison) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        alone = torch.zeros(2**16, 32, dtype=dtype)
        alone[:, 5] = every.view(dtype)
        for values, bits in product((every.view(dtype).view(1, -1), alone.view(4, -1)), BITS):
            payloads = comparison.same("encode_blocks", encoded, values, bits, 32)
            for options in ((True, None), (False, 7)):
                comparison.same("encode_blocks", encoded, values, bits, 32, *options)
            for output in DTYPES:
                comparison.same("decode_blocks", decoded, payloads, values.shape[1], output, bits, 32, about=f"all of {dtype}")


def _check_gaps(comparison: Comparison) -> None:
    """Compares rows that start at any address, for which wide accesses are not allowed, with guard values beside them."""
    for dtype, bits, (first, gap) in product(DTYPES, BITS, ((0, 1), (1, 7), (3, 5))):
        values = torch.randn(3, 480, generator=torch.Generator().manual_seed(gap)).to(dtype)
        payloads = comparison.same("encode_blocks", _encoded_at, values, first, gap, bits, 96)
        comparison.same("decode_blocks", _decoded_at, payloads, values, first, gap, bits, 96)


def _encoded_at(ops: Ops, values: Tensor, first: int, gap: int, bits: int, block_numel: int) -> Tensor:
    return encoded(ops, mean_bits.placed(values, first, gap)[1], bits, block_numel)


def _decoded_at(ops: Ops, payloads: Tensor, values: Tensor, first: int, gap: int, bits: int, block_numel: int) -> Tensor:
    """The storage, with its guards, in which `values` are written over."""
    storage, rows = mean_bits.placed(values, first, gap)
    ops.decode_blocks(payloads, rows, bits, block_numel)
    return storage


def _check_many_slices(comparison: Comparison) -> None:
    """Compares more slices than a grid has rows."""
    values = torch.randn(70_001, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    comparison.same("encode_blocks", encoded, values, 4, 32)


def _check_reference_on_gpu(comparison: Comparison) -> None:
    """Compares the plain-torch reference, which runs on GPUs if no kernels are built, with itself on the CPU."""
    for dtype, bits, options in product(DTYPES, BITS, ((False, None), (True, 2**62))):
        for kind, values in enumerate(kernel_bits.kinds_of_values(dtype, 320)):
            call = Call(encoded, (values, bits, 32, *options), f"kind {kind}")
            on_gpu = encoded(reference, values.to(comparison.device), bits, 32, *options)
            comparison.equal("encode_blocks of the reference", on_gpu, encoded(reference, values, bits, 32, *options), call, last=call.byte)
            comparison.compared += 1
