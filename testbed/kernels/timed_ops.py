"""The calls of kernels whose times are taken, each with the bytes that it reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], object]
Make = Callable[[], tuple[Call, int]]  # a call with new tensors, and the bytes that it moves
Op = tuple[str, str, Make]  # codes, name, call

EXACT = "bf16"
VOCABULARY = 50304  # columns of logits
SEED = 1  # which quotients take an encoder's slower way depends on the values
# Those with so little arithmetic that a copy's rate is within reach. A rotation adds 8 steps or more to each value, an exponential about as
# many; the gradient of logits has one for every 4 bytes, their parts one for every 2.
BOUND_BY_MEMORY = {
    (EXACT, "dropout"),
    (EXACT, "gradient of logits"),
    *((EXACT, f"mean of {name}") for name in ("2", "8", "2 to bf16")),
    *((f"INT{bits}", f"{op} {dtype}") for bits in (8, 4) for op in ("encode", "decode to") for dtype in ("bf16", "fp32")),
}


def timed_ops(slices: int, row_numel: int, block_numel: int, device: str = "cuda") -> Iterator[Op]:
    """The calls on `slices` x `row_numel` values; together they call every kernel of ops/extension.py."""
    yield from _exact(slices, row_numel, device)
    yield from _loss(slices * row_numel, device)
    for bits in (8, 4):
        yield from _in_blocks(slices, row_numel, block_numel, bits, device)
    for bits, rounds in ((3, 1), (1, 2)):
        yield from _gaussian(slices, row_numel, bits, rounds, device)


def normal(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random values, by a generator of their own: after a capture that failed, torch's can no longer be used."""
    return torch.randn(*shape, device=device, dtype=dtype, generator=_generator(device))


@cache
def _generator(device: str) -> torch.Generator:
    return torch.Generator(device).manual_seed(SEED)


def _exact(slices: int, row_numel: int, device: str) -> Iterator[Op]:
    """Kernels of values that are not quantized."""

    def drop() -> tuple[Call, int]:
        from megatron_zpp.ops.dropout import dropout, mask_start

        values = normal(slices * row_numel, device=device, dtype=torch.bfloat16)
        return partial(dropout, values, mask_start(2**62, 3), 0.1), 2 * values.nbytes

    def mean(members: int, dtype: torch.dtype = torch.float32) -> tuple[Call, int]:
        """Added to the values that it is written over, in fp32."""
        from megatron_zpp.ops.means import mean_values

        values = normal(members, slices, row_numel, device=device, dtype=torch.bfloat16)
        means, is_added = torch.zeros(slices, row_numel, dtype=dtype, device=device), dtype == torch.float32
        return partial(mean_values, values, means, accumulate=is_added), values.nbytes + (2 if is_added else 1) * means.nbytes

    yield EXACT, "dropout", drop
    yield EXACT, "mean of 2", partial(mean, 2)
    yield EXACT, "mean of 8", partial(mean, 8)
    yield EXACT, "mean of 2 to bf16", partial(mean, 2, torch.bfloat16)


def _loss(numel: int, device: str) -> Iterator[Op]:
    """Kernels of the loss, and the same with torch's own kernels, as if they moved as many bytes."""
    from megatron_zpp.ops import softmax_reference
    from megatron_zpp.ops.softmax import Columns, LogitParts, TokenTerms, softmax_gradient, softmax_parts

    columns = Columns(0, min(numel, VOCABULARY))

    def inputs() -> tuple[Tensor, TokenTerms]:
        logits = normal(numel // columns.entries, columns.entries, device=device, dtype=torch.bfloat16)
        labels = torch.arange(len(logits), device=device) % columns.entries
        largest, sums, grad_loss = torch.ones(3, len(logits), device=device).unbind()
        return logits, TokenTerms(labels, largest, sums, grad_loss)

    def parts() -> tuple[Call, int]:
        logits, terms = inputs()
        return partial(softmax_parts, logits, terms.labels_T, columns, overwrites=False), logits.nbytes

    def parts_by_torch() -> tuple[Call, int]:
        logits, terms = inputs()
        written = LogitParts(*torch.empty(3, len(logits), device=device).unbind())
        call = partial(softmax_reference.softmax_parts, logits, terms.labels_T, *columns, *written, overwrites=False)
        return call, logits.nbytes

    def gradient() -> tuple[Call, int]:
        logits, terms = inputs()
        return partial(softmax_gradient, logits, columns.first, terms, logits), 2 * logits.nbytes

    def gradient_by_torch() -> tuple[Call, int]:
        logits, terms = inputs()
        given = (terms.labels_T, columns.first, terms.largest_T, terms.sums_T, terms.grad_loss_T)
        return partial(softmax_reference.softmax_gradient, logits, *given, logits), 2 * logits.nbytes

    yield EXACT, "parts of logits", parts
    yield EXACT, "parts of logits, by torch", parts_by_torch
    yield EXACT, "gradient of logits", gradient
    yield EXACT, "gradient of logits, by torch", gradient_by_torch


def _in_blocks(slices: int, row_numel: int, block_numel: int, bits: int, device: str) -> Iterator[Op]:
    """Kernels of integers that share a scale per block."""
    from megatron_zpp.ops import payload, quantization

    form: dict[str, Any] = {"bits": bits, "block_numel": block_numel}
    row_bytes = payload.coded_bytes(row_numel, **form)

    def payloads(*shape: int) -> Tensor:
        made = torch.empty(*shape, row_bytes, dtype=torch.uint8, device=device)
        values = normal(slices, row_numel, device=device, dtype=torch.bfloat16)
        for member in made.view(-1, slices, row_bytes):
            quantization.encode_blocks(values, member, **form)
        return made

    def encode(dtype: torch.dtype, **options: Any) -> tuple[Call, int]:
        values = normal(slices, row_numel, device=device).to(dtype)
        target = torch.empty(slices, row_bytes, dtype=torch.uint8, device=device)
        return partial(quantization.encode_blocks, values, target, **form, **options), values.nbytes + target.nbytes

    def decode(dtype: torch.dtype) -> tuple[Call, int]:
        source, values = payloads(slices), torch.empty(slices, row_numel, dtype=dtype, device=device)
        return partial(quantization.decode_blocks, source, values, **form), values.nbytes + source.nbytes

    def add_mean(members: int, **options: Any) -> tuple[Call, int]:
        source, mean = payloads(members, slices), torch.zeros(slices, row_numel, device=device)
        call = partial(quantization.decode_mean_blocks, source, mean, **form, accumulate=True, **options)
        return call, 2 * mean.nbytes + source.nbytes

    def recode(members: int, **options: Any) -> tuple[Call, int]:
        source, target = payloads(members, slices), torch.empty(slices, row_bytes, dtype=torch.uint8, device=device)
        call = partial(quantization.recode_mean_blocks, source, target, row_numel=row_numel, next_bits=bits, **form, **options)
        return call, source.nbytes + target.nbytes

    makes: dict[str, Make] = {
        "encode bf16": partial(encode, torch.bfloat16),
        "encode fp32": partial(encode, torch.float32),
        "decode to bf16": partial(decode, torch.bfloat16),
        "decode to fp32": partial(decode, torch.float32),
        "decode, add mean of 2": partial(add_mean, 2),
        "decode, mean of 2, encode": partial(recode, 2),
        "decode, mean of 8, encode": partial(recode, 8),
        "encode rotated bf16": partial(encode, torch.bfloat16, rotated=True),
        "encode bf16 stochastically": partial(encode, torch.bfloat16, noise_key=1),
        "encode rotated bf16 stochastically": partial(encode, torch.bfloat16, rotated=True, noise_key=1),
        "decode, add rotated mean of 2": partial(add_mean, 2, rotated=True),
        "decode, mean of 2, encode stochastically": partial(recode, 2, noise_key=1),
    }
    yield from ((f"INT{bits}", name, make) for name, make in makes.items())


def _gaussian(slices: int, row_numel: int, bits: int, rounds: int, device: str) -> Iterator[Op]:
    """Kernels of Gaussian codes."""
    from megatron_zpp.ops import gaussian, payload

    form: dict[str, Any] = {"bits": bits, "rounds": rounds}
    row_bytes = payload.gaussian_bytes(row_numel, bits)

    def payloads(*shape: int) -> Tensor:
        made = torch.empty(*shape, row_bytes, dtype=torch.uint8, device=device)
        values = normal(slices, row_numel, device=device, dtype=torch.bfloat16)
        for key, member in enumerate(made.view(-1, slices, row_bytes)):
            gaussian.encode_gaussian(values, member, **form, key=key)
        return made

    def encode(dtype: torch.dtype) -> tuple[Call, int]:
        values = normal(slices, row_numel, device=device).to(dtype)
        target = torch.empty(slices, row_bytes, dtype=torch.uint8, device=device)
        return partial(gaussian.encode_gaussian, values, target, **form, key=1), values.nbytes + target.nbytes

    def decode(*, accumulate: bool) -> tuple[Call, int]:
        source, values = payloads(slices), torch.zeros(slices, row_numel, dtype=torch.bfloat16, device=device)
        call = partial(gaussian.decode_gaussian, source, values, **form, keys=[0] * slices, accumulate=accumulate)
        return call, (2 if accumulate else 1) * values.nbytes + source.nbytes

    def add_mean(members: int) -> tuple[Call, int]:
        source, mean = payloads(members, slices), torch.zeros(slices, row_numel, device=device)
        call = partial(gaussian.decode_mean_gaussian, source, mean, **form, keys=range(members), accumulate=True)
        return call, 2 * mean.nbytes + source.nbytes

    makes: dict[str, Make] = {
        "encode bf16": partial(encode, torch.bfloat16),
        "encode fp32": partial(encode, torch.float32),
        "decode to bf16": partial(decode, accumulate=False),
        "decode to bf16, added": partial(decode, accumulate=True),
        "decode, add mean of 2": partial(add_mean, 2),
        "decode, add mean of 8": partial(add_mean, 8),
    }
    yield from ((f"Gaussian {bits}, rounds {rounds}", name, make) for name, make in makes.items())
