"""Compares the bits of every CUDA kernel with those of the reference on the CPU, on ordinary, extreme and awkward inputs."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu.build import require_kernels
from gpu.outcome import Outcome

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

SIZES = ((32, 300), (96, 45), (256, 70), (992, 5), (1056, 3), (8224, 2), (32800, 1))  # a team cannot hold the last, and reads it twice
MORE_THAN_INT32 = 2**31 + 256 * 37


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

    def _call(self, op: str, read: tuple[Tensor, ...], written: Tensor, *numbers: Any) -> None:
        target = written.to(self._device)
        getattr(torch.ops.megatron_zpp, op)(*(tensor.to(self._device) for tensor in read), target, *numbers)
        written.copy_(target)


def run() -> Outcome:
    outcome = Outcome()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    require_kernels(device)
    _check_sizes(outcome, device)
    _check_all_16_bit_values(outcome, device)
    _check_gaps(outcome, device)
    _check_dropout(outcome, device)
    _check_means(outcome, device)
    if device == "cpu":
        outcome.omissions.append("the CUDA kernels: torch finds no GPU here; the C++ kernels were checked instead")
        return outcome
    _check_many_slices(outcome)
    _check_beyond_32_bits(outcome)
    _check_reference_on_gpu(outcome)
    return outcome


def _check_sizes(outcome: Outcome, device: str) -> None:
    from harness.kernel_bits import check_all, check_options

    compared, start = 0, time.monotonic()
    for block_numel, blocks in SIZES:
        try:
            compared += check_all(OpsOn(device), block_numel, blocks) + check_options(OpsOn(device), block_numel, blocks)
        except AssertionError as difference:
            outcome.check(f"{blocks} blocks of {block_numel}: kernels equal the reference {difference}", holds=False)
    outcome.measured |= {"results_compared": compared, "compare_seconds": round(time.monotonic() - start, 1)}
    outcome.check(f"{compared} results on the {device} equal the reference's bit for bit", holds=not outcome.failures)


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
    from megatron_zpp.ops.payload import coded_bytes

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
    outcome.lines.append("rows at odd places, with guards beside them, were compared too")


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


def _check_many_slices(outcome: Outcome) -> None:
    """Checks more slices than a grid has rows."""
    from harness.kernel_bits import encoded
    from harness.per_block import equal_bits

    from megatron_zpp.ops import reference

    values = torch.randn(70_001, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    is_equal = equal_bits(encoded(OpsOn("cuda"), values, 4, 32), encoded(reference, values, 4, 32))
    outcome.check("70,001 slices, more than a grid has rows", holds=is_equal)


def _check_beyond_32_bits(outcome: Outcome) -> None:
    """Checks a run whose offsets need more than 32 bits: in 8 bits it has the bytes of its parts and decodes to the same values."""
    from megatron_zpp.ops.payload import coded_bytes

    needed_bytes = 8 * MORE_THAN_INT32
    if torch.cuda.mem_get_info()[0] < needed_bytes:
        outcome.omissions.append(f"runs of more than 2^31 values: {needed_bytes / 2**30:.0f} GiB of GPU memory are not free")
        return
    values = torch.randn(1, MORE_THAN_INT32, device="cuda", dtype=torch.bfloat16)
    payload = torch.zeros(1, coded_bytes(MORE_THAN_INT32, 8, 256), dtype=torch.uint8, device="cuda")
    torch.ops.megatron_zpp.encode_blocks(values, payload, 8, 256)
    decoded = torch.empty_like(values)
    torch.ops.megatron_zpp.decode_blocks(payload, decoded, 8, 256)
    is_equal = True
    part_numel = 2**26
    for start in range(0, MORE_THAN_INT32, part_numel):
        some = values[:, start : start + part_numel]
        part = torch.zeros(1, coded_bytes(some.shape[1], 8, 256), dtype=torch.uint8, device="cuda")
        torch.ops.megatron_zpp.encode_blocks(some, part, 8, 256)
        is_equal = is_equal and torch.equal(part[:, : some.shape[1]], payload[:, start : start + some.shape[1]])
        again = torch.empty_like(some)
        torch.ops.megatron_zpp.decode_blocks(part, again, 8, 256)
        is_equal = is_equal and torch.equal(again, decoded[:, start : start + some.shape[1]])
    outcome.check(f"a run of {MORE_THAN_INT32:,} values equals its parts", holds=is_equal)


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
