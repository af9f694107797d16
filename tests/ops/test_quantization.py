from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from harness.kernel_programs import compared
from harness.per_block import equal_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_zpp.ops import extension, quantization, reference
from megatron_zpp.ops.build import Build
from megatron_zpp.ops.payload import coded_bytes
from testbed.kernels.bit_differences import Comparison
from testbed.kernels.kernel_bits import BITS, DTYPES, UNTOUCHED, check_all, check_options, decoded, encoded

BLOCK = 32


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _payloads(*shape: int, row_numel: int, bits: int = 8, extra: int = 0) -> Tensor:
    return torch.full((*shape, coded_bytes(row_numel, bits, BLOCK) + extra), UNTOUCHED, dtype=torch.uint8)


@given(st.integers(0, 100), st.sampled_from([32, 64, 256, 1024]), st.sampled_from(BITS))
def test_coded_bytes_are_codes_and_scales_each_padded_to_16(blocks: int, block_numel: int, bits: int) -> None:
    codes, scales = blocks * block_numel * bits // 8, blocks * 4
    assert coded_bytes(blocks * block_numel, bits, block_numel) == codes + -codes % 16 + scales + -scales % 16


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("block_numel, blocks", [(32, 1), (32, 300), (96, 45), (256, 3), (256, 16), (1024, 5), (8192, 2)])
def test_kernels_bit_equal_the_reference(block_numel: int, blocks: int) -> None:
    check_all(comparison := Comparison(), block_numel, blocks)
    assert comparison.count() > 100


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("block_numel, blocks", [(32, 1), (32, 300), (96, 45), (256, 16), (1056, 2), (8192, 2)])
def test_kernels_bit_equal_the_reference_on_rotated_values_and_in_stochastic_rounding(block_numel: int, blocks: int) -> None:
    check_options(comparison := Comparison(), block_numel, blocks)
    assert comparison.count() > 100


@pytest.mark.compiles
def test_portable_kernels_bit_equal_the_reference_too() -> None:
    assert compared("kernel_bits.py", Build(portable=True).make(), "32:37", "256:19") > 500


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codes_without_division_equal_the_definition_for_every_pair_of_largest_value_and_value(dtype: torch.dtype, bits: int) -> None:
    # Within the normal range, codes of 16-bit values depend only on both significands and the difference of exponents.
    significand_steps = 2 ** (7 if dtype == torch.bfloat16 else 10)
    first = torch.tensor(1.0, dtype=dtype).view(torch.int16).item()
    values = torch.arange(first - 9 * significand_steps, first + significand_steps, dtype=torch.int16).view(
        dtype
    )  # 9 binades below 1, and [1, 2)
    for largest in values[-significand_steps:].split(64):
        blocks = torch.minimum(values.expand(len(largest), -1), largest.unsqueeze(1))
        assert equal_bits(
            encoded(torch.ops.megatron_zpp, blocks, bits, values.numel()), encoded(reference, blocks, bits, values.numel())
        ), largest


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("noise_key", [None, 3])
@pytest.mark.parametrize("exponent", [-135, -97, 0, 96, 120])
def test_codes_of_fp32_values_beside_every_half_integer_are_those_of_the_division(exponent: int, noise_key: int | None, bits: int) -> None:
    # Multiplying by the scale's inverse may round these to the other side, so such chunks have to divide. The scales 2^-100 and 2^100, from
    # which on all chunks divide, lie between some of the exponents.
    largest_code, block_numel, blocks = 2 ** (bits - 1) - 1, 1280, 64
    largest = torch.ldexp(1 + torch.rand(blocks, 1, generator=torch.Generator().manual_seed(bits)), torch.tensor(float(exponent)))
    scales = (largest / torch.tensor(float(largest_code))).double()
    halves = torch.arange(block_numel) % (2 * largest_code) - largest_code + 0.5
    if noise_key is not None:
        halves = halves - reference.noise(noise_key, torch.arange(blocks * block_numel // 2)).view(blocks, -1).double()
    steps = torch.arange(block_numel) // (2 * largest_code) % 5 - 2  # units in the last place away
    values = ((halves * scales).float().view(torch.int32) + steps.int()).view(torch.float32)
    values = torch.where(values.abs() < largest, values, 0)
    values[:, :1] = largest
    arguments = (values.view(1, -1), bits, block_numel, False, noise_key)
    assert equal_bits(encoded(torch.ops.megatron_zpp, *arguments), encoded(reference, *arguments))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_65536_values_of_16_bits_encode_and_decode_as_in_the_reference(dtype: torch.dtype, bits: int) -> None:
    # As neighbours, as the largest value of a block beside halves of it, and beside zeros.
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    halves = torch.stack([every, *[every / 2**power for power in range(1, 16)], *[-every / 2**power for power in range(16)]], dim=1)
    alone = torch.zeros(2**16, 32, dtype=dtype)
    alone[:, 5] = every
    for values in (every.view(1, -1), halves.view(4, -1), alone.view(4, -1)):
        payloads = encoded(reference, values, bits, BLOCK)
        assert equal_bits(encoded(torch.ops.megatron_zpp, values, bits, BLOCK), payloads)
        for options in ((True, None), (False, 7), (True, 7)):
            arguments = (values, bits, BLOCK, *options)
            assert equal_bits(encoded(torch.ops.megatron_zpp, *arguments), encoded(reference, *arguments)), options
        for output in DTYPES:
            arguments = (payloads, values.shape[1], output, bits, BLOCK)
            assert equal_bits(decoded(torch.ops.megatron_zpp, *arguments), decoded(reference, *arguments))


@pytest.mark.usefixtures("kernels")
@settings(max_examples=60)
@given(st.binary(min_size=1280, max_size=1280), st.sampled_from(BITS), st.booleans(), st.none() | st.integers(0, 2**63 - 1))
def test_fp32_values_of_any_bits_encode_as_in_the_reference(some_bytes: bytes, bits: int, rotated: bool, noise_key: int | None) -> None:
    values = torch.frombuffer(bytearray(some_bytes), dtype=torch.float32).view(2, 160)
    arguments = (values, bits, BLOCK, rotated, noise_key)
    assert equal_bits(encoded(torch.ops.megatron_zpp, *arguments), encoded(reference, *arguments))


@pytest.mark.usefixtures("kernels")
@settings(max_examples=60)
@given(st.integers(0, 4), st.integers(0, 70), st.integers(0, 3), st.integers(0, 5), st.sampled_from(DTYPES), st.sampled_from(BITS))
def test_rows_may_be_apart_and_nothing_beside_them_is_touched(
    slices: int, blocks: int, gap: int, margin: int, dtype: torch.dtype, bits: int
) -> None:
    row_numel = blocks * BLOCK
    values = torch.randn(slices, row_numel + gap, generator=torch.Generator().manual_seed(gap))[:, :row_numel].to(dtype)
    wide = torch.zeros(slices, row_numel + gap, dtype=dtype)
    wide[:, :row_numel] = values
    row_bytes = coded_bytes(row_numel, bits, BLOCK)
    payloads = _payloads(slices, row_numel=row_numel, bits=bits, extra=16 * margin)
    quantization.encode_blocks(wide[:, :row_numel], payloads, bits=bits, block_numel=BLOCK)
    assert equal_bits(payloads[:, :row_bytes], encoded(reference, values, bits, BLOCK)[:, :row_bytes])
    assert (payloads[:, row_bytes:] == UNTOUCHED).all()
    apart = torch.full((slices, row_numel + gap), 7.0, dtype=dtype)
    quantization.decode_blocks(payloads, apart[:, :row_numel], bits=bits, block_numel=BLOCK)
    assert equal_bits(apart[:, :row_numel], decoded(reference, payloads, row_numel, dtype, bits, BLOCK))
    assert (apart[:, row_numel:] == 7).all()


@pytest.mark.usefixtures("kernels", "two_threads")
@pytest.mark.parametrize("bits", BITS)
def test_two_threads_give_the_bits_of_one(bits: int) -> None:
    values = torch.randn(3, 2**16, generator=torch.Generator().manual_seed(bits)).bfloat16()
    payloads = encoded(torch.ops.megatron_zpp, values, bits, 256)
    optional = encoded(torch.ops.megatron_zpp, values, bits, 256, True, 3)
    parallel = decoded(torch.ops.megatron_zpp, payloads, 2**16, torch.bfloat16, bits, 256)
    torch.set_num_threads(1)
    assert equal_bits(payloads, encoded(torch.ops.megatron_zpp, values, bits, 256))
    assert equal_bits(optional, encoded(torch.ops.megatron_zpp, values, bits, 256, True, 3))
    assert equal_bits(parallel, decoded(torch.ops.megatron_zpp, payloads, 2**16, torch.bfloat16, bits, 256))


@pytest.mark.usefixtures("kernels")
def test_the_reference_takes_over_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    with_kernels = _all_four_ops()
    monkeypatch.setattr(extension, "_loaded", None)
    monkeypatch.setattr(reference, "encode_blocks", _counted(reference.encode_blocks, calls := []))
    assert all(equal_bits(left, right) for left, right in zip(with_kernels, _all_four_ops(), strict=True))
    assert len(calls) == 3  # twice on its own, and inside recode_mean_blocks


def _all_four_ops() -> list[Tensor]:
    values = torch.randn(2, 320, generator=torch.Generator().manual_seed(5))
    payloads, recoded = _payloads(3, 2, row_numel=320), _payloads(2, row_numel=320, bits=4)
    quantization.encode_blocks(values, payloads[0], bits=8, block_numel=BLOCK)
    payloads[1:] = payloads[0]
    decoded_values, mean = torch.empty(2, 320, dtype=torch.float16), torch.ones(2, 320)
    quantization.decode_blocks(payloads[1], decoded_values, bits=8, block_numel=BLOCK)
    quantization.decode_mean_blocks(payloads, mean, bits=8, block_numel=BLOCK, accumulate=True)
    quantization.recode_mean_blocks(payloads, recoded, row_numel=320, bits=8, next_bits=4, block_numel=BLOCK, noise_key=1)
    quantization.encode_blocks(values, payloads[2], bits=8, block_numel=BLOCK, rotated=True, noise_key=2)
    rotated_mean = torch.ones(2, 320)
    quantization.decode_mean_blocks(payloads, rotated_mean, bits=8, block_numel=BLOCK, accumulate=True, rotated=True)
    return [payloads, decoded_values, mean, recoded, rotated_mean]


def _counted(function: object, calls: list[object]) -> object:
    def count(*arguments: object) -> object:
        calls.append(arguments)
        return function(*arguments)

    return count


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("op", extension.OPS)
def test_ops_pass_opcheck(op: str) -> None:
    values = torch.randn(2, 64)
    payloads, payload = torch.zeros(3, 2, coded_bytes(64, 8, BLOCK), dtype=torch.uint8), torch.zeros(2, 96, dtype=torch.uint8)
    arguments = {
        "encode_blocks": (values, payload, 8, BLOCK, True, 1),
        "decode_blocks": (payload, values, 8, BLOCK),
        "decode_mean_blocks": (payloads, values, 8, BLOCK, True, True),
        "recode_mean_blocks": (payloads, payload, 64, 8, 4, BLOCK, 1),
        "mean_values": (torch.randn(3, 2, 64, dtype=torch.bfloat16), values, True),
        "encode_gaussian": (torch.randn(2, 256), payload, 2, 1, 1),
        "decode_gaussian": (payload, torch.zeros(2, 256), 2, 1, [1, 2], True),
        "decode_mean_gaussian": (payloads, torch.zeros(2, 256), 2, 2, [1, 2, 3], True),
        "drop_values": (values, torch.zeros(2, 64), 1, 2**40, 2**31, 2.0),
    }
    torch.library.opcheck(getattr(torch.ops.megatron_zpp, op).default, arguments[op])


GOOD = torch.zeros(2, 64)
GOOD_PAYLOADS = torch.zeros(2, 96, dtype=torch.uint8)
MISTAKES = [
    ({"values": GOOD.double()}, "values is torch.float64; expected torch.float32 or torch.bfloat16 or torch.float16."),
    ({"values": GOOD[0]}, "values has shape [64]; expected [slices, numel]."),
    ({"values": torch.zeros(64, 2).T}, "values has strides [1, 2]; expected a contiguous inner dim."),
    ({"values": torch.zeros(2, 65)}, "a row has 65 values; expected a multiple of block_numel, 32."),
    ({"values": torch.zeros(3, 64)}, "slices of payloads: 2; expected 3."),
    ({"values": GOOD.to("meta")}, "values on meta, payloads on cpu; expected one device."),
    ({"payloads": GOOD_PAYLOADS.view(torch.int8)}, "payloads is torch.int8; expected torch.uint8."),
    ({"payloads": GOOD_PAYLOADS[:, :79]}, "payloads has shape [2, 79]; expected [slices, at least 80 bytes]."),
    ({"payloads": torch.zeros(1, 2, 96, dtype=torch.uint8)}, "payloads has shape [1, 2, 96]; expected [slices, at least 80 bytes]."),
    ({"payloads": torch.zeros(2, 100, dtype=torch.uint8)}, "strides [100, 1]; expected rows that start at multiples of 16 bytes."),
    ({"payloads": torch.zeros(2, 96, dtype=torch.uint8)[:, 8:]}, "payloads starts at byte 8 with strides [96, 1]; expected rows"),
    ({"payloads": torch.zeros(96, dtype=torch.uint8).expand(2, 96)}, "strides [0, 1]; expected rows that do not overlap."),
    ({"bits": 6}, "bits is 6; expected 4 or 8."),
    ({"block_numel": 48}, "block_numel is 48; expected a multiple of 32."),
    ({"block_numel": 0}, "block_numel is 0; expected a multiple of 32."),
    ({"noise_key": -1}, "noise_key is -1; expected None or 0 to 9223372036854775807."),
    ({"noise_key": 2**63}, "noise_key is 9223372036854775808; expected None or 0 to 9223372036854775807."),
]  # fmt: skip


@pytest.mark.parametrize("change, message", MISTAKES)
def test_errors_name_what_was_found_and_what_was_expected(change: dict[str, object], message: str) -> None:
    arguments = {"values": GOOD, "payloads": GOOD_PAYLOADS, "bits": 8, "block_numel": BLOCK} | change
    with pytest.raises(ValueError, match=re.escape(message)):
        quantization.encode_blocks(**arguments)


def test_a_noise_key_out_of_range_is_an_error_when_means_are_recoded_too() -> None:
    with pytest.raises(ValueError, match="noise_key is -1; expected None or 0 to"):
        quantization.recode_mean_blocks(
            GOOD_PAYLOADS.unsqueeze(0), GOOD_PAYLOADS, row_numel=64, bits=8, next_bits=8, block_numel=BLOCK, noise_key=-1
        )


def test_there_is_no_mean_of_no_members() -> None:
    with pytest.raises(ValueError, match=re.escape("payloads has shape [0, 2, 96]; expected at least one member")):
        quantization.decode_mean_blocks(torch.zeros(0, 2, 96, dtype=torch.uint8), GOOD, bits=8, block_numel=BLOCK, accumulate=False)


def test_a_mean_is_fp32() -> None:
    with pytest.raises(ValueError, match="mean is torch.bfloat16; expected torch.float32."):
        quantization.decode_mean_blocks(GOOD_PAYLOADS.unsqueeze(0), GOOD.bfloat16(), bits=8, block_numel=BLOCK, accumulate=False)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "op, arguments, message",
    [
        ("encode_blocks", (GOOD.double(), GOOD_PAYLOADS, 8, BLOCK), "values must be float32, bfloat16 or float16, not Double"),
        ("encode_blocks", (GOOD, GOOD_PAYLOADS, 5, BLOCK), "bits must be 4 or 8, not 5"),
        ("encode_blocks", (GOOD, GOOD_PAYLOADS, 8, BLOCK, False, -2), "noise_key must be none or at least 0, not -2"),
        ("encode_blocks", (GOOD, GOOD_PAYLOADS[:, :64], 8, BLOCK), "payloads must have rows of at least 80 bytes, not 64"),
        ("decode_blocks", (GOOD_PAYLOADS[:1], GOOD, 8, BLOCK), "payloads must have 2 slices, not 1"),
        ("decode_mean_blocks", (GOOD_PAYLOADS, GOOD, 8, BLOCK, False), "payloads must have 3 dims, not 2"),
        (
            "recode_mean_blocks",
            (GOOD_PAYLOADS.unsqueeze(0), GOOD_PAYLOADS, 50, 8, 4, BLOCK),
            "a row must have a multiple of block_numel 32 values, not 50",
        ),
    ],
)
def test_kernels_called_past_the_python_checks_refuse_what_would_leave_their_tensors(
    op: str, arguments: tuple[object, ...], message: str
) -> None:
    with pytest.raises(RuntimeError, match=re.escape(message)):
        getattr(torch.ops.megatron_zpp, op)(*arguments)
