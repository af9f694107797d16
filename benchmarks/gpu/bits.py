"""Compares the bits of every CUDA kernel with those of the reference on the CPU, on ordinary, extreme and awkward inputs."""

from __future__ import annotations

import sys
import time as clock
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu.deadline import Deadline
from gpu.device_errors import attempt
from gpu.outcome import Outcome
from gpu.place import Place, require_kernels
from megatron_zpp.ops import extension
from megatron_zpp.ops.gaussian_reference import parts_of
from megatron_zpp.ops.means import mean_values
from megatron_zpp.ops.payload import coded_bytes, gaussian_bytes
from megatron_zpp.ops.softmax import Columns, TokenTerms, softmax_gradient, softmax_parts

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

SIZES = ((32, 300), (96, 45), (256, 70), (992, 5), (1056, 3), (8224, 2), (32800, 1))  # a team cannot hold the last, and reads it twice
LONG_NUMEL, PART_NUMEL = 2**31 + 256 * 37, 2**26  # of a run whose offsets need more than 32 bits, and of the parts it is compared with
TINY_NUMEL, TINY_PART_NUMEL = 2**16 + 256 * 37, 2**13
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
LOSS_COLUMNS = 256  # divides the numbers of values above
CHECK_SECONDS = 3.0  # below which no further check is begun


class OpsOn:
    """Calls the kernels of a device with CPU tensors, and copies the written tensor back."""

    def __init__(self, device: str) -> None:
        self._device = device

    def encode_blocks(
        self, values: Tensor, payloads: Tensor, bits: int, block_numel: int, rotated: bool = False, noise_key: int | None = None
    ) -> None:
        self._call("encode_blocks", (values,), payloads, bits, block_numel, rotated, noise_key)

    def decode_blocks(self, payloads: Tensor, values: Tensor, bits: int, block_numel: int) -> None:
        self._call("decode_blocks", (payloads,), values, bits, block_numel)

    def decode_mean_blocks(
        self, payloads: Tensor, mean: Tensor, bits: int, block_numel: int, accumulate: bool, rotated: bool = False
    ) -> None:
        self._call("decode_mean_blocks", (payloads,), mean, bits, block_numel, accumulate, rotated)

    def recode_mean_blocks(
        self, payloads: Tensor, recoded: Tensor, run_numel: int, bits: int, next_bits: int, block_numel: int, noise_key: int | None = None
    ) -> None:
        self._call("recode_mean_blocks", (payloads,), recoded, run_numel, bits, next_bits, block_numel, noise_key)

    def encode_gaussian(self, values: Tensor, payloads: Tensor, bits: int, rounds: int, key: int) -> None:
        self._call("encode_gaussian", (values,), payloads, bits, rounds, key)

    def decode_gaussian(self, payloads: Tensor, values: Tensor, bits: int, rounds: int, keys: Sequence[int], accumulate: bool) -> None:
        self._call("decode_gaussian", (payloads,), values, bits, rounds, keys, accumulate)

    def decode_mean_gaussian(self, payloads: Tensor, mean: Tensor, bits: int, rounds: int, keys: Sequence[int], accumulate: bool) -> None:
        self._call("decode_mean_gaussian", (payloads,), mean, bits, rounds, keys, accumulate)

    def _call(self, op: str, read: tuple[Tensor, ...], written: Tensor, *numbers: Any) -> None:
        target = written.to(self._device)
        getattr(torch.ops.megatron_zpp, op)(*(tensor.to(self._device) for tensor in read), target, *numbers)
        written.copy_(target)


def run(time: Deadline, outcome: Outcome) -> None:
    place = Place.here()
    require_kernels(place)
    device = place.device.type
    for op in (*extension.OPS, *extension.LOSS_OPS):
        if op not in CHECKED:
            outcome.omit(f"the kernel {op}: no check of its bits is written here")
    sizes = SIZES[:2] if place.is_tiny else SIZES
    checks: dict[str, Callable[[], None]] = {
        f"{blocks} blocks of {block_numel}": partial(_check_size, outcome, device, block_numel, blocks) for block_numel, blocks in sizes
    }
    checks |= {
        "dropout": partial(_check_dropout, outcome, device),
        "means": partial(_check_means, outcome, device),
        "Gaussian codes": partial(_check_gaussian, outcome, device, GAUSSIAN_BLOCKS[:1] if place.is_tiny else GAUSSIAN_BLOCKS),
        "rows at odd places": partial(_check_gaps, outcome, device),
        "all 16-bit values": partial(_check_all_16_bit_values, outcome, device),
    }
    long = Long(device, *((TINY_NUMEL, TINY_PART_NUMEL) if place.is_tiny else (LONG_NUMEL, PART_NUMEL)))
    checks |= {
        f"runs of {long.numel:,} values": partial(_check_long_runs, outcome, long),
        f"means of {long.numel:,} values": partial(_check_long_means, outcome, long),
        f"exact means of {long.numel:,} values": partial(_check_long_exact_means, outcome, long),
        f"Gaussian codes of {long.numel:,} values": partial(_check_long_gaussian, outcome, long),
        f"dropout of {long.numel:,} values": partial(_check_long_dropout, outcome, long),
        f"loss of {long.numel:,} logits": partial(_check_long_loss, outcome, long),
        "many slices": partial(_check_many_slices, outcome, device),
    }
    if extension.has_loss_kernels_for(device):
        checks["the loss"] = partial(_check_loss, outcome, device)
    else:
        outcome.omit("the kernels of the loss: they are for GPUs only")
    if place.is_gpu:
        checks["the reference on the GPU"] = partial(_check_reference_on_gpu, outcome)
    else:
        outcome.omit("the CUDA kernels, and more than 2^31 values: torch finds no GPU here; the C++ kernels were checked instead")
    for name, check in checks.items():
        if not time.has(CHECK_SECONDS):
            outcome.ran_late(name)
            continue
        start = clock.monotonic()
        attempt(outcome, name, check)
        outcome.measure(**{f"seconds of {name}": round(clock.monotonic() - start, 1)})
        if place.is_gpu:
            torch.cuda.empty_cache()


def _check_size(outcome: Outcome, device: str, block_numel: int, blocks: int) -> None:
    from harness.kernel_bits import check_all, check_options

    try:
        compared = check_all(OpsOn(device), block_numel, blocks) + check_options(OpsOn(device), block_numel, blocks)
        outcome.check(f"{blocks} blocks of {block_numel}: {compared} results equal the reference's bit for bit", holds=True)
    except AssertionError as difference:
        outcome.check(f"{blocks} blocks of {block_numel}: kernels equal the reference {difference}", holds=False)


def _check_all_16_bit_values(outcome: Outcome, device: str) -> None:
    from harness.kernel_bits import BITS, DTYPES, decoded, encoded
    from harness.per_block import equal_bits

    from megatron_zpp.ops import reference

    every = torch.arange(-(2**15), 2**15).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        alone = torch.zeros(2**16, 32, dtype=dtype)
        alone[:, 5] = every.view(dtype)
        for values in (every.view(dtype).view(1, -1), alone.view(4, -1)):
            for bits in BITS:
                payloads = encoded(reference, values, bits, 32)
                is_equal = equal_bits(encoded(OpsOn(device), values, bits, 32), payloads)
                for options in ((True, None), (False, 7)):
                    arguments = (values, bits, 32, *options)
                    is_equal = is_equal and equal_bits(encoded(OpsOn(device), *arguments), encoded(reference, *arguments))
                for output in DTYPES:
                    arguments = (payloads, values.shape[1], output, bits, 32)
                    is_equal = is_equal and equal_bits(decoded(OpsOn(device), *arguments), decoded(reference, *arguments))
                outcome.check(f"all 65,536 values of {dtype} in {bits} bits, {list(values.shape)}", holds=is_equal)


def _check_gaps(outcome: Outcome, device: str) -> None:
    """Checks rows that start at any address, for which wide accesses are not allowed, with guard values beside them."""
    from harness.kernel_bits import BITS, DTYPES, encoded
    from harness.per_block import equal_bits

    from megatron_zpp.ops import reference

    for dtype in DTYPES:
        for bits in BITS:
            for start, gap in ((0, 1), (1, 7), (3, 5)):
                values = torch.full((3, start + 96 * 5 + gap), 7.0).to(dtype)
                values[:, start : start + 480] = torch.randn(3, 480, generator=torch.Generator().manual_seed(gap)).to(dtype)
                payloads = encoded(reference, values[:, start : start + 480].contiguous(), bits, 96)
                on_device = values.to(device)
                received = torch.full_like(payloads, 0xA5).to(device)
                torch.ops.megatron_zpp.encode_blocks(on_device[:, start : start + 480], received, bits, 96)
                is_equal = equal_bits(received.cpu()[:, : coded_bytes(480, bits, 96)], payloads[:, : coded_bytes(480, bits, 96)])
                expected = values.clone()
                reference.decode_blocks(payloads, expected[:, start : start + 480], bits, 96)
                torch.ops.megatron_zpp.decode_blocks(received, on_device[:, start : start + 480], bits, 96)
                is_equal = is_equal and equal_bits(on_device.cpu(), expected)
                if not is_equal:
                    outcome.check(f"{dtype}, {bits} bits, rows at {start} with gaps of {gap}", holds=False)
    outcome.say("rows at odd places, with guards beside them, were compared")


def _check_dropout(outcome: Outcome, device: str) -> None:
    """Checks dropout on sizes and indices of all kinds, with guard values beside them."""
    from harness.dropout_bits import check

    try:
        outcome.check(f"{check(device)} results of dropout equal the reference's bit for bit", holds=True)
    except AssertionError as difference:
        outcome.check(f"dropout equals the reference {difference}", holds=False)


def _check_means(outcome: Outcome, device: str) -> None:
    """Checks means of values that are not quantized, on sizes and rows of all kinds, with guard values beside them."""
    from harness.mean_bits import check

    try:
        outcome.check(f"{check(device)} means of values that are not quantized equal the reference's bit for bit", holds=True)
    except AssertionError as difference:
        outcome.check(f"a mean of values that are not quantized equals the reference's {difference}", holds=False)


def _check_loss(outcome: Outcome, device: str) -> None:
    """Checks the kernels of the loss beside fp64 within their rounding, at all places with the same bits, with guard values beside rows."""
    from harness.softmax_errors import check

    try:
        outcome.check(f"{check(device)} cases of the loss are within rounding of fp64, with the same bits at any place", holds=True)
    except AssertionError as difference:
        outcome.check(f"the loss is within rounding of fp64, with the same bits at any place {difference}", holds=False)


def _check_gaussian(outcome: Outcome, device: str, sizes: Sequence[int]) -> None:
    """Checks Gaussian codes on values and payloads of all kinds."""
    from harness.gaussian_bits import check_any_payloads, check_values

    try:
        compared = sum(check_values(OpsOn(device), blocks) + check_any_payloads(OpsOn(device), blocks) for blocks in sizes)
        outcome.check(f"{compared} results of Gaussian codes equal the reference's bit for bit", holds=True)
    except AssertionError as difference:
        outcome.check(f"Gaussian codes equal the reference {difference}", holds=False)


def _check_many_slices(outcome: Outcome, device: str) -> None:
    """Checks more slices than a grid has rows."""
    from harness.kernel_bits import encoded
    from harness.per_block import equal_bits

    from megatron_zpp.ops import reference

    values = torch.randn(70_001, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    is_equal = equal_bits(encoded(OpsOn(device), values, 4, 32), encoded(reference, values, 4, 32))
    outcome.check("70,001 slices, more than a grid has rows", holds=is_equal)


@dataclass(frozen=True)
class Long:
    """A long run, which is compared with its parts of `part_numel` values."""

    device: str
    numel: int
    part_numel: int

    def parts(self) -> list[slice]:
        return [slice(start, min(start + self.part_numel, self.numel)) for start in range(0, self.numel, self.part_numel)]

    def lacks_memory(self, outcome: Outcome, what: str, bytes_per_value: int) -> bool:
        """Whether so much GPU memory is not free; says so."""
        needed = bytes_per_value * self.numel
        if self.device == "cpu" or torch.cuda.mem_get_info()[0] >= needed:
            return False
        outcome.omit(f"{what} of {self.numel:,} values: {needed / 2**30:.0f} GiB of GPU memory are not free")
        return True

    def values(self, seed: int) -> Tensor:
        """[1, numel] bf16."""
        values = torch.empty(1, self.numel, device=self.device, dtype=torch.bfloat16)
        return values.normal_(generator=torch.Generator(self.device).manual_seed(seed))

    def encoded(self, values: Tensor, bits: int = 8) -> Tensor:
        """Payloads of `values` [1, run]."""
        payloads = torch.zeros(1, coded_bytes(values.shape[1], bits, 256), dtype=torch.uint8, device=self.device)
        torch.ops.megatron_zpp.encode_blocks(values, payloads, bits, 256)
        return payloads


def _check_long_runs(outcome: Outcome, long: Long) -> None:
    """Checks that in 8 bits a run has the codes of its parts, and decodes to the same values."""
    if long.lacks_memory(outcome, "runs", 8):
        return
    values = long.values(1)
    payload, decoded = long.encoded(values), torch.empty_like(values)
    torch.ops.megatron_zpp.decode_blocks(payload, decoded, 8, 256)
    is_equal = True
    for place in long.parts():
        some = values[:, place].contiguous()
        part, again = long.encoded(some), torch.empty_like(some)
        torch.ops.megatron_zpp.decode_blocks(part, again, 8, 256)
        is_equal = is_equal and torch.equal(part[:, : some.shape[1]], payload[:, place]) and torch.equal(again, decoded[:, place])
    outcome.check(f"a run of {long.numel:,} values equals its parts", holds=is_equal)


def _check_long_means(outcome: Outcome, long: Long) -> None:
    """Checks that the mean of two members is that of their parts, and is encoded to the same codes."""
    if long.lacks_memory(outcome, "means", 14):
        return
    payloads = torch.stack([long.encoded(long.values(member)) for member in range(2)])
    recoded = torch.zeros(1, coded_bytes(long.numel, 4, 256), dtype=torch.uint8, device=long.device)
    torch.ops.megatron_zpp.recode_mean_blocks(payloads, recoded, long.numel, 8, 4, 256)
    mean = torch.empty(1, long.numel, device=long.device)
    torch.ops.megatron_zpp.decode_mean_blocks(payloads, mean, 8, 256, False)
    is_mean = is_recoded = True
    for place in long.parts():
        numel = place.stop - place.start
        # The codes of a part, then its scales, 4 bytes for 256 values. In the whole run scales begin behind all codes.
        scales = slice(long.numel + place.start // 64, long.numel + place.stop // 64)
        some = torch.zeros(2, 1, coded_bytes(numel, 8, 256), dtype=torch.uint8, device=long.device)
        some[:, :, :numel] = payloads[:, :, place]
        some[:, :, numel : numel + numel // 64] = payloads[:, :, scales]
        part = torch.empty(1, numel, device=long.device)
        torch.ops.megatron_zpp.decode_mean_blocks(some, part, 8, 256, False)
        is_mean = is_mean and torch.equal(part, mean[:, place])
        is_recoded = is_recoded and torch.equal(long.encoded(part, 4)[:, : numel // 2], recoded[:, place.start // 2 : place.stop // 2])
    outcome.check(f"the mean of two runs of {long.numel:,} values is that of their parts", holds=is_mean)
    outcome.check(f"the mean of two runs of {long.numel:,} values is encoded as that of their parts", holds=is_recoded)


def _check_long_exact_means(outcome: Outcome, long: Long) -> None:
    """Checks that the mean of two members that are not quantized is that of their parts."""
    if long.lacks_memory(outcome, "exact means", 10):
        return
    members = torch.empty(2, 1, long.numel, device=long.device, dtype=torch.bfloat16)
    for number, member in enumerate(members):
        member.copy_(long.values(number))
    mean = torch.empty(1, long.numel, device=long.device)
    mean_values(members, mean, accumulate=False)
    is_equal = True
    for place in long.parts():
        part = torch.empty(1, place.stop - place.start, device=long.device)
        mean_values(members[:, :, place].contiguous(), part, accumulate=False)
        is_equal = is_equal and torch.equal(part, mean[:, place])
    outcome.check(f"the exact mean of two runs of {long.numel:,} values is that of their parts", holds=is_equal)


def _check_long_gaussian(outcome: Outcome, long: Long) -> None:
    """Checks that a run has the Gaussian codes of its parts and decodes to the same values, and likewise the mean of two members."""
    if long.lacks_memory(outcome, "Gaussian codes", 12):
        return
    values = long.values(4)
    whole = _gaussian_results(values)
    is_equal = True
    for place in long.parts():
        for own, of_all in zip(_gaussian_results(values[:, place].contiguous()), whole, strict=True):
            start = place.start * of_all.shape[1] // long.numel
            is_equal = is_equal and torch.equal(own, of_all[:, start : start + own.shape[1]])
    outcome.check(f"Gaussian codes of {long.numel:,} values are those of their parts", holds=is_equal)


def _gaussian_results(values: Tensor) -> tuple[Tensor, ...]:
    """Scales and codes of `values` [1, run], what they decode to, and the mean with codes of another key: each [1, a share of run]."""
    bits, rounds, keys = 4, 2, [2**62 + 11, 12]
    payloads = torch.zeros(len(keys), 1, gaussian_bytes(values.shape[1], bits), dtype=torch.uint8, device=values.device)
    for member, key in zip(payloads, keys, strict=True):
        torch.ops.megatron_zpp.encode_gaussian(values, member, bits, rounds, key)
    decoded, mean = torch.empty_like(values), torch.empty_like(values, dtype=torch.float32)
    torch.ops.megatron_zpp.decode_gaussian(payloads[0], decoded, bits, rounds, keys[:1], False)
    torch.ops.megatron_zpp.decode_mean_gaussian(payloads, mean, bits, rounds, keys, False)
    return *parts_of(payloads[0], values.shape[1], bits), decoded, mean


def _check_long_dropout(outcome: Outcome, long: Long) -> None:
    """Checks that dropout drops of a tensor what it drops of its parts."""
    if long.lacks_memory(outcome, "dropout", 6):
        return
    values = long.values(2).view(-1)
    dropped = torch.empty_like(values)
    key, first, threshold, scale = 2**62 + 11, 2**33 - 5, 429496730, 1 / 0.9
    torch.ops.megatron_zpp.drop_values(values, dropped, key, first, threshold, scale)
    is_equal = True
    for place in long.parts():
        part = torch.empty_like(values[place])
        torch.ops.megatron_zpp.drop_values(values[place], part, key, first + place.start, threshold, scale)
        is_equal = is_equal and torch.equal(part, dropped[place])
    outcome.check(f"dropout of {long.numel:,} values is that of their parts", holds=is_equal)


def _check_long_loss(outcome: Outcome, long: Long) -> None:
    """Checks that tokens have the same softmax and gradient of logits among many as among few."""
    if long.lacks_memory(outcome, "the loss", 6):
        return
    columns = Columns(100, 1000)
    logits = long.values(3).view(-1, LOSS_COLUMNS)
    labels = torch.arange(len(logits), device=long.device) % columns.entries
    gradient, grad_loss = torch.empty_like(logits), torch.ones(len(logits), device=long.device)
    parts = softmax_parts(logits, labels, columns, overwrites=False)
    terms = TokenTerms(labels, parts.largest_T, parts.sums_T, grad_loss)
    softmax_gradient(logits, columns.first, terms, gradient)
    is_equal = True
    for place in long.parts():
        rows = slice(place.start // LOSS_COLUMNS, place.stop // LOSS_COLUMNS)
        some = logits[rows].clone()
        part = softmax_parts(some, labels[rows], columns, overwrites=False)
        is_equal = is_equal and all(torch.equal(one, whole[rows]) for one, whole in zip(part, parts, strict=True))
        softmax_gradient(some, columns.first, TokenTerms(*(term[rows] for term in terms)), some)
        is_equal = is_equal and torch.equal(some, gradient[rows])
    outcome.check(f"the loss of {long.numel:,} logits is that of their parts", holds=is_equal)


def _check_reference_on_gpu(outcome: Outcome) -> None:
    """Checks that the plain-torch reference, which runs on GPUs if no kernels are built, gives the same bits there as on the CPU."""
    from harness.kernel_bits import BITS, DTYPES, encoded, kinds_of_values
    from harness.per_block import equal_bits

    from megatron_zpp.ops import reference

    differing = 0
    for dtype in DTYPES:
        for bits in BITS:
            for values in kinds_of_values(dtype, 320):
                payloads = encoded(reference, values, bits, 32)
                on_gpu = torch.full_like(payloads, 0xA5).cuda()
                reference.encode_blocks(values.cuda(), on_gpu, bits, 32)
                differing += not equal_bits(on_gpu.cpu(), payloads)
                optional = encoded(reference, values, bits, 32, True, 2**62)
                reference.encode_blocks(values.cuda(), on_gpu, bits, 32, True, 2**62)
                differing += not equal_bits(on_gpu.cpu(), optional)
    outcome.check("the plain-torch reference encodes on the GPU as on the CPU", holds=differing == 0)
