"""Compares the bits of kernels on runs whose offsets need more than 32 bits with those on parts of the runs, which need fewer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.gpu.outcome import NotDone
from megatron_zpp.ops.gaussian_reference import parts_of
from megatron_zpp.ops.means import mean_values
from megatron_zpp.ops.payload import coded_bytes, gaussian_bytes
from megatron_zpp.ops.softmax import Columns, TokenTerms, softmax_gradient, softmax_parts

if TYPE_CHECKING:
    from testbed.kernels.bit_differences import Comparison

LONG_NUMEL, PART_NUMEL = 2**31 + 256 * 37, 2**26
TINY_NUMEL, TINY_PART_NUMEL = 2**16 + 256 * 37, 2**13
BLOCK_NUMEL = 256
LOSS_COLUMNS = 256  # divides the numbers of values above


@dataclass(frozen=True)
class Long:
    """A long run, which is compared with its parts of `part_numel` values."""

    comparison: Comparison
    numel: int
    part_numel: int

    @property
    def device(self) -> str:
        return self.comparison.device

    @property
    def ops(self) -> Any:
        return self.comparison.ops

    def parts(self) -> list[slice]:
        return [slice(start, min(start + self.part_numel, self.numel)) for start in range(0, self.numel, self.part_numel)]

    def require_memory(self, bytes_per_value: int) -> None:
        """Raises NotDone if so much GPU memory is not free."""
        needed = bytes_per_value * self.numel
        if self.device != "cpu" and torch.cuda.mem_get_info()[0] < needed:
            raise NotDone(f"{needed / 2**30:.0f} GiB of GPU memory are not free")

    def values(self, seed: int) -> Tensor:
        """[1, numel] bf16."""
        values = torch.empty(1, self.numel, device=self.device, dtype=torch.bfloat16)
        return values.normal_(generator=torch.Generator(self.device).manual_seed(seed))

    def encoded(self, values: Tensor, bits: int = 8) -> Tensor:
        """Payloads of `values` [1, run]."""
        payloads = torch.zeros(1, coded_bytes(values.shape[1], bits, BLOCK_NUMEL), dtype=torch.uint8, device=self.device)
        self.ops.encode_blocks(values, payloads, bits, BLOCK_NUMEL)
        return payloads

    def equal(self, op: str, whole: Tensor, place: slice, part: Tensor, words: str) -> None:
        """Compares a result of the whole run with one of the part at `place`. Results of runs are rows, or one row that is the run."""
        dim = 1 if len(whole) == 1 else 0
        start = [0] * whole.ndim
        start[dim] = place.start * whole.shape[dim] // self.numel
        case = f"{words}, values {place.start:,} to {place.stop:,} of {self.numel:,}"
        self.comparison.equal(op, whole.narrow(dim, start[dim], part.shape[dim]), part, case, start=start)
        self.comparison.compared += 1


def check_codes(long: Long) -> None:
    """Checks that in 8 bits a run has the codes of its parts, and decodes to the same values."""
    long.require_memory(8)
    values = long.values(1)
    payload, decoded = long.encoded(values), torch.empty_like(values)
    long.ops.decode_blocks(payload, decoded, 8, BLOCK_NUMEL)
    for place in long.parts():
        some = values[:, place].contiguous()
        part, again = long.encoded(some), torch.empty_like(some)
        long.ops.decode_blocks(part, again, 8, BLOCK_NUMEL)
        long.equal("encode_blocks", payload[:, : long.numel], place, part[:, : some.shape[1]], "codes of bfloat16 in 8 bits")
        long.equal("decode_blocks", decoded, place, again, "bfloat16 of 8 bits")


def check_means(long: Long) -> None:
    """Checks that the mean of two members is that of their parts, and is encoded to the same codes."""
    long.require_memory(14)
    payloads = torch.stack([long.encoded(long.values(member)) for member in range(2)])
    recoded = torch.zeros(1, coded_bytes(long.numel, 4, BLOCK_NUMEL), dtype=torch.uint8, device=long.device)
    long.ops.recode_mean_blocks(payloads, recoded, long.numel, 8, 4, BLOCK_NUMEL)
    mean = torch.empty(1, long.numel, device=long.device)
    long.ops.decode_mean_blocks(payloads, mean, 8, BLOCK_NUMEL, False)
    for place in long.parts():
        numel = place.stop - place.start
        # The codes of a part, then its scales, 4 bytes for 256 values. In the whole run scales begin behind all codes.
        scales = slice(long.numel + place.start // 64, long.numel + place.stop // 64)
        some = torch.zeros(2, 1, coded_bytes(numel, 8, BLOCK_NUMEL), dtype=torch.uint8, device=long.device)
        some[:, :, :numel] = payloads[:, :, place]
        some[:, :, numel : numel + numel // 64] = payloads[:, :, scales]
        part = torch.empty(1, numel, device=long.device)
        long.ops.decode_mean_blocks(some, part, 8, BLOCK_NUMEL, False)
        long.equal("decode_mean_blocks", mean, place, part, "2 members in 8 bits")
        codes = long.encoded(part, 4)[:, : numel // 2]
        long.equal("recode_mean_blocks", recoded[:, : long.numel // 2], place, codes, "codes in 4 bits of 2 members in 8 bits")


def check_exact_means(long: Long) -> None:
    """Checks that the mean of two members that are not quantized is that of their parts."""
    long.require_memory(10)
    members = torch.empty(2, 1, long.numel, device=long.device, dtype=torch.bfloat16)
    for number, member in enumerate(members):
        member.copy_(long.values(number))
    mean = torch.empty(1, long.numel, device=long.device)
    mean_values(members, mean, accumulate=False)
    for place in long.parts():
        part = torch.empty(1, place.stop - place.start, device=long.device)
        mean_values(members[:, :, place].contiguous(), part, accumulate=False)
        long.equal("mean_values", mean, place, part, "float32 mean of 2 bfloat16 members")


def check_gaussian(long: Long) -> None:
    """Checks that a run has the Gaussian codes of its parts and decodes to the same values, and likewise the mean of two members."""
    long.require_memory(12)
    values = long.values(4)
    whole = gaussian_results(long.ops, values)
    for place in long.parts():
        for (op, words), own in gaussian_results(long.ops, values[:, place].contiguous()).items():
            long.equal(op, whole[op, words], place, own, words)


def gaussian_results(ops: Any, values: Tensor) -> dict[tuple[str, str], Tensor]:
    """By op and in words: scales and codes of `values` [1, run], what they decode to, and the mean with codes of another key.

    Each is [1, a share of run].
    """
    bits, rounds, keys = 4, 2, [2**62 + 11, 12]
    payloads = torch.zeros(len(keys), 1, gaussian_bytes(values.shape[1], bits), dtype=torch.uint8, device=values.device)
    for member, key in zip(payloads, keys, strict=True):
        ops.encode_gaussian(values, member, bits, rounds, key)
    decoded, mean = torch.empty_like(values), torch.empty_like(values, dtype=torch.float32)
    ops.decode_gaussian(payloads[0], decoded, bits, rounds, keys[:1], False)
    ops.decode_mean_gaussian(payloads, mean, bits, rounds, keys, False)
    parts = parts_of(payloads[0], values.shape[1], bits)
    return {
        ("encode_gaussian", f"scales of bfloat16 in {bits} bits"): parts.scales,
        ("encode_gaussian", f"codes of bfloat16 in {bits} bits"): parts.planes,
        ("decode_gaussian", f"bfloat16 of {bits} bits"): decoded,
        ("decode_mean_gaussian", f"{len(keys)} members in {bits} bits"): mean,
    }


def check_dropout(long: Long) -> None:
    """Checks that dropout drops of a tensor what it drops of its parts."""
    long.require_memory(6)
    values = long.values(2).view(-1)
    dropped = torch.empty_like(values)
    key, first, threshold, scale = 2**62 + 11, 2**33 - 5, 429496730, 1 / 0.9
    long.ops.drop_values(values, dropped, key, first, threshold, scale)
    for place in long.parts():
        part = torch.empty_like(values[place])
        long.ops.drop_values(values[place], part, key, first + place.start, threshold, scale)
        long.equal("drop_values", dropped, place, part, f"bfloat16 from index {first} on")


def check_loss(long: Long) -> None:
    """Checks that tokens have the same softmax and gradient of logits among many as among few."""
    long.require_memory(6)
    columns = Columns(100, 1000)
    logits = long.values(3).view(-1, LOSS_COLUMNS)
    labels = torch.arange(len(logits), device=long.device) % columns.entries
    gradient, grad_loss = torch.empty_like(logits), torch.ones(len(logits), device=long.device)
    parts = softmax_parts(logits, labels, columns, overwrites=False)
    terms = TokenTerms(labels, parts.largest_T, parts.sums_T, grad_loss)
    softmax_gradient(logits, columns.first, terms, gradient)
    words = f"of bfloat16 logits in rows of {LOSS_COLUMNS}"
    for place in long.parts():
        rows = slice(place.start // LOSS_COLUMNS, place.stop // LOSS_COLUMNS)
        some = logits[rows].clone()
        part = softmax_parts(some, labels[rows], columns, overwrites=False)
        for name, own in part._asdict().items():
            long.equal("softmax_parts", getattr(parts, name), place, own, f"{name} {words}")
        softmax_gradient(some, columns.first, TokenTerms(*(term[rows] for term in terms)), some)
        long.equal("softmax_gradient", gradient, place, some, f"gradient {words}")


CHECKS = {
    "runs": check_codes,
    "means": check_means,
    "exact means": check_exact_means,
    "Gaussian codes": check_gaussian,
    "dropout": check_dropout,
    "loss": check_loss,
}
