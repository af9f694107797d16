from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from harness.block_numbers import ROUNDOFF, after_blocks, largest_code, rotated, roundoff, worst_error
from harness.codes import CodeOptions, code
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_zpp.comm.code import EXACT, Code, Rotation, Rounding
from megatron_zpp.comm.codecs import BlockCodec, CastCodec, Codec, Regions, SliceShape, make_codec

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
UNTOUCHED = 0xAB
dtypes = st.sampled_from(DTYPES)
bits_of_codes = st.sampled_from([4, 8])
block_numels = st.sampled_from([32, 64, 96, 256])


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, SliceShape]:
    """A block size and the runs of a slice."""
    block_numel = draw(block_numels)
    slice_shape = SliceShape(block_numel * draw(st.integers(0, 6)), draw(st.integers(0, 40)))
    return block_numel, slice_shape if slice_shape.numel else SliceShape(block_numel, 0)


def _codec(bits: int, block_numel: int, exact: torch.dtype = torch.float32) -> BlockCodec:
    return BlockCodec(code(bits), block_numel, CastCodec(exact))


def _values(slices: int, slice_shape: SliceShape, dtype: torch.dtype, seed: int) -> Regions:
    """Of very different sizes from block to block."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(slices * slice_shape.numel, generator=generator)
    sizes = torch.exp(2 * torch.randn(-(-values.numel() // 32), generator=generator)).repeat_interleave(32)[: values.numel()]
    return Regions.of((values * sizes).to(dtype), slice_shape)


def _payloads(codec: Codec, *shape: int, slice_shape: SliceShape) -> Tensor:
    return torch.full((*shape, codec.payload_bytes(slice_shape)), UNTOUCHED, dtype=torch.uint8)


def _encoded(codec: Codec, values: Regions) -> Tensor:
    payloads = _payloads(codec, values.slices, slice_shape=values.slice_shape)
    codec.encode_into(values, payloads)
    return payloads


def _decoded(codec: Codec, payloads: Tensor, slice_shape: SliceShape, dtype: torch.dtype) -> Regions:
    decoded = Regions.of(torch.empty(payloads.shape[0] * slice_shape.numel, dtype=dtype), slice_shape)
    codec.decode_into(payloads, decoded)
    return decoded


def _flat(regions: Regions) -> Tensor:
    return torch.cat([part.flatten() for part in regions.parts()])


def _same_bits(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


# ---- the payload


@settings(max_examples=60)
@given(shapes(), bits_of_codes, dtypes)
def test_a_payload_is_codes_scales_and_exact_values_each_padded_to_16_bytes(
    shape: tuple[int, SliceShape], bits: int, exact: torch.dtype
) -> None:
    block_numel, slice_shape = shape
    parts = [slice_shape.blocks * bits // 8, slice_shape.blocks // block_numel * 4, slice_shape.exact * torch.finfo(exact).bits // 8]
    padded = [next(size for size in range(0, 10_000, 16) if size >= part) for part in parts]
    assert _codec(bits, block_numel, exact).payload_bytes(slice_shape) == sum(padded)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_parts_of_a_payload_stand_where_the_format_says_and_the_gaps_between_them_are_not_written(bits: int) -> None:
    slice_shape = SliceShape(96, 3)
    values = _values(2, slice_shape, torch.float32, seed=1)
    values.blocks[0, 40] = 1e4  # the largest of its block
    payloads = _encoded(_codec(bits, 32), values)
    codes_bytes = {4: 48, 8: 96}[bits]
    assert payloads.shape == (2, codes_bytes + 16 + 16)
    for row, blocks, exact in zip(payloads, values.blocks, values.exact, strict=True):
        scales = row[codes_bytes : codes_bytes + 12].view(torch.float32)
        assert torch.equal(scales, blocks.view(3, 32).abs().amax(1) / {4: 7.0, 8: 127.0}[bits])
        assert torch.equal(row[codes_bytes + 16 : codes_bytes + 28].view(torch.float32), exact)
        assert (row[codes_bytes + 12 : codes_bytes + 16] == UNTOUCHED).all() and (row[codes_bytes + 28 :] == UNTOUCHED).all()
    code = int(payloads[0, 40]) if bits == 8 else int(payloads[0, 20]) % 16  # an even element is the low nibble
    assert code == {4: 7, 8: 127}[bits]


@pytest.mark.parametrize("bits, share", [(8, 0.016), (4, 0.032)])
def test_scales_of_blocks_of_256_values_cost_less_than_promised(bits: int, share: float) -> None:
    slice_shape = SliceShape(256 * 1000, 0)
    payload_bytes = _codec(bits, 256).payload_bytes(slice_shape)
    assert (payload_bytes - slice_shape.blocks * bits // 8) / payload_bytes <= share


def test_each_slice_has_a_payload_of_its_own() -> None:
    values = _values(4, SliceShape(64, 5), torch.bfloat16, seed=3)
    together = _encoded(_codec(4, 32), values)
    for index in range(4):
        assert torch.equal(_encoded(_codec(4, 32), values.slice_at(index))[0], together[index])


@pytest.mark.parametrize("bits", [0, 2, 6, 12, 32])
def test_bits_that_no_codec_has_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=f"{bits} bits per value are not available; choose 4 or 8, or None"):
        Code(bits)


def test_values_that_cross_as_they_are_can_neither_rotate_nor_round() -> None:
    for rotation, rounding in [(Rotation.HADAMARD, Rounding.NEAREST), (Rotation.NONE, Rounding.STOCHASTIC)]:
        with pytest.raises(ValueError, match="choose 4 or 8 bits, or neither option"):
            Code(None, rotation, rounding)


# ---- what comes back


@settings(max_examples=80)
@given(shapes(), bits_of_codes, dtypes, dtypes, st.integers(1, 4))
def test_every_value_comes_back_within_half_a_step_of_its_block(
    shape: tuple[int, SliceShape], bits: int, source: torch.dtype, target: torch.dtype, slices: int
) -> None:
    block_numel, slice_shape = shape
    values = _values(slices, slice_shape, source, seed=2)
    decoded = _decoded(_codec(bits, block_numel), _encoded(_codec(bits, block_numel), values), slice_shape, target)
    # A value is rounded once more, to the target; below 2^-14 fp16 has steps of 2^-24.
    magnitude = values.blocks.double().abs() + worst_error(values.blocks, bits, block_numel)
    bound = worst_error(values.blocks, bits, block_numel) + roundoff(target) * magnitude + 2.0**-25
    assert ((decoded.blocks.double() - values.blocks.double()).abs() <= bound).all()


@settings(max_examples=80)
@given(shapes(), bits_of_codes, dtypes, dtypes, st.integers(1, 4))
def test_every_value_comes_back_with_the_bits_of_the_definition(
    shape: tuple[int, SliceShape], bits: int, source: torch.dtype, target: torch.dtype, slices: int
) -> None:
    block_numel, slice_shape = shape
    values = _values(slices, slice_shape, source, seed=4)
    decoded = _decoded(_codec(bits, block_numel), _encoded(_codec(bits, block_numel), values), slice_shape, target)
    assert torch.equal(decoded.blocks, after_blocks(values.blocks, bits, block_numel).to(target))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_values_of_either_sign_come_back_alike(dtype: torch.dtype, bits: int) -> None:
    values = _values(3, SliceShape(64, 0), dtype, seed=5)
    for row in values.blocks.view(-1, 32):
        row[3], row[7] = row.abs().amax(), -row.abs().amax()
    decoded = _decoded(_codec(bits, 32), _encoded(_codec(bits, 32), values), values.slice_shape, torch.float32).blocks.view(-1, 32)
    largest = values.blocks.float().view(-1, 32).abs().amax(1)
    assert torch.equal(decoded[:, 3], -decoded[:, 7])
    torch.testing.assert_close(decoded[:, 3], largest, rtol=2.0**-23, atol=0)  # scale and product round once each


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_values_are_read_as_the_numbers_they_are(dtype: torch.dtype, bits: int) -> None:
    exponents = torch.arange(-12, 4).repeat(4)
    values = Regions.of((torch.ones(64) * 2.0**exponents * 1.5).to(dtype), SliceShape(64, 0))
    widened = Regions.of(torch.ones(64) * 2.0**exponents * 1.5, SliceShape(64, 0))
    assert torch.equal(_encoded(_codec(bits, 32), values), _encoded(_codec(bits, 32), widened))
    decoded = _decoded(_codec(bits, 32), _encoded(_codec(bits, 32), values), values.slice_shape, dtype)
    assert decoded.blocks[0, 15] == 12.0  # the largest of the block, in whichever dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.int16, torch.uint8])
def test_values_of_other_dtypes_are_refused_on_the_way_in_and_on_the_way_out(dtype: torch.dtype) -> None:
    codec = _codec(8, 32)
    values = Regions.of(torch.ones(32, dtype=dtype), SliceShape(32, 0))
    payloads = _payloads(codec, 1, slice_shape=SliceShape(32, 0))
    with pytest.raises(ValueError, match=str(dtype)):
        codec.encode_into(values, payloads)
    with pytest.raises(ValueError, match=str(dtype)):
        codec.decode_into(payloads, values)


@settings(max_examples=60)
@given(shapes(), bits_of_codes, dtypes, st.integers(1, 4))
def test_the_exact_values_come_back_bit_for_bit(shape: tuple[int, SliceShape], bits: int, dtype: torch.dtype, slices: int) -> None:
    block_numel, slice_shape = shape
    values = _values(slices, slice_shape, dtype, seed=6)
    values.exact.mul_(1e-6)  # nothing of it would be left beside the blocks if it shared a scale with them
    codec = _codec(bits, block_numel, dtype)
    assert _same_bits(_decoded(codec, _encoded(codec, values), slice_shape, dtype).exact, values.exact)


def test_an_exact_run_keeps_infinities_negative_zero_and_subnormal_values() -> None:
    for dtype in DTYPES:
        special = torch.tensor([float("inf"), float("-inf"), -0.0, torch.finfo(dtype).smallest_normal / 4]).to(dtype)
        codec = _codec(4, 32, dtype)
        values = Regions.of(torch.cat([torch.ones(32, dtype=dtype), special]), SliceShape(32, 4))
        assert _same_bits(_decoded(codec, _encoded(codec, values), values.slice_shape, dtype).exact[0], special)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_padding_behind_a_parameter_comes_back_as_zeros_and_leaves_no_mark_on_the_parameter(bits: int) -> None:
    values = _values(1, SliceShape(96, 0), torch.float32, seed=7)
    values.blocks[0, 40:] = 0.0  # the second block is half padding, the third one whole
    decoded = _decoded(_codec(bits, 32), _encoded(_codec(bits, 32), values), values.slice_shape, torch.float32).blocks[0]
    assert torch.equal(decoded[40:], torch.zeros(56))
    assert torch.equal(decoded[32:40], after_blocks(torch.cat([values.blocks[0, 32:40]] * 4), bits, 32)[:8])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_that_is_not_finite_makes_its_whole_block_nan_and_no_other(dtype: torch.dtype, bad: float, bits: int) -> None:
    for place in (0, 17, 31):
        values = _values(2, SliceShape(96, 4), dtype, seed=8)
        values.blocks[1, 32 + place] = bad
        decoded = _decoded(_codec(bits, 32), _encoded(_codec(bits, 32), values), values.slice_shape, dtype)
        is_bad = decoded.blocks.isnan()
        assert is_bad[1, 32:64].all() and int(is_bad.sum()) == 32 and decoded.exact.isfinite().all()


# ---- means


@settings(max_examples=60)
@given(shapes(), bits_of_codes, dtypes, st.integers(1, 5), st.integers(1, 3), st.booleans())
def test_the_mean_is_the_ordered_fp32_sum_of_decoded_members_divided_by_their_number(
    shape: tuple[int, SliceShape], bits: int, dtype: torch.dtype, members: int, slices: int, accumulate: bool
) -> None:
    block_numel, slice_shape = shape
    sent, payloads = _sent(_codec(bits, block_numel, dtype), slice_shape, dtype, members, slices)
    mean = _values(slices, slice_shape, torch.float32, seed=9)
    before = _flat(mean).clone()
    _codec(bits, block_numel, dtype).decode_mean_into(payloads, mean, accumulate=accumulate)
    total = torch.zeros_like(before)
    for index, values in enumerate(sent):
        part = torch.cat([after_blocks(values.blocks, bits, block_numel).flatten(), values.exact.float().flatten()])
        total = part if index == 0 else total + part
    assert torch.equal(_flat(mean), before + total / members if accumulate else total / members)


def _sent(codec: Codec, slice_shape: SliceShape, dtype: torch.dtype, members: int, slices: int) -> tuple[list[Regions], Tensor]:
    sent = [_values(slices, slice_shape, dtype, seed=20 + member) for member in range(members)]
    return sent, torch.stack([_encoded(codec, values) for values in sent])


@settings(max_examples=60)
@given(shapes(), bits_of_codes, bits_of_codes, dtypes, st.integers(1, 5), st.integers(1, 3))
def test_the_fused_middle_of_a_descent_has_the_bits_of_decoding_averaging_and_encoding(
    shape: tuple[int, SliceShape], bits: int, next_bits: int, dtype: torch.dtype, members: int, slices: int
) -> None:
    block_numel, slice_shape = shape
    _check_middle(_codec(bits, block_numel, dtype), _codec(next_bits, block_numel, dtype), slice_shape, dtype, members, slices)


def _check_middle(codec: Codec, next_codec: Codec, slice_shape: SliceShape, dtype: torch.dtype, members: int, slices: int) -> None:
    _, payloads = _sent(codec, slice_shape, dtype, members, slices)
    recoded = _payloads(next_codec, slices, slice_shape=slice_shape)
    codec.recode_mean_into(payloads, next_codec, recoded, slice_shape)
    if getattr(codec, "is_rotated", False) and getattr(next_codec, "is_rotated", False) and codec.block_numel == next_codec.block_numel:
        codec, next_codec = (replace(each, code=replace(each.code, rotation=Rotation.NONE)) for each in (codec, next_codec))
    mean = Regions.of(torch.empty(slices * slice_shape.numel), slice_shape)
    codec.decode_mean_into(payloads, mean, accumulate=False)
    assert torch.equal(recoded, _encoded(next_codec, mean))


CODECS: list[Codec] = [
    _codec(4, 32, torch.bfloat16),
    _codec(8, 64, torch.bfloat16),
    _codec(4, 96, torch.float32),
    _codec(8, 32, torch.float16),
    BlockCodec(Code(4, Rotation.HADAMARD, Rounding.STOCHASTIC), 32, CastCodec(torch.bfloat16), noise_key=1),
    BlockCodec(Code(8, rounding=Rounding.STOCHASTIC), 64, CastCodec(torch.bfloat16), noise_key=2),
    CastCodec(torch.bfloat16),
    CastCodec(torch.float32),
]


@pytest.mark.parametrize("codec, next_codec", list(itertools.product(CODECS, CODECS)), ids=str)
def test_the_middle_of_a_descent_between_any_two_codecs_has_the_bits_of_its_parts(codec: Codec, next_codec: Codec) -> None:
    _check_middle(codec, next_codec, SliceShape(576, 5), torch.bfloat16, members=3, slices=2)


@pytest.mark.parametrize("codec, next_codec", list(itertools.product(CODECS, CODECS)), ids=str)
def test_a_value_that_is_not_finite_passes_the_middle_of_a_descent(codec: Codec, next_codec: Codec) -> None:
    slice_shape = SliceShape(576, 5)
    for bad, (part, place) in itertools.product([float("nan"), float("inf")], [(0, 575), (1, 4)]):
        values = _values(2, slice_shape, torch.bfloat16, seed=11)
        list(values.parts())[part][1, place] = bad
        payloads = torch.stack([_encoded(codec, _values(2, slice_shape, torch.bfloat16, seed=12)), _encoded(codec, values)])
        recoded = _payloads(next_codec, 2, slice_shape=slice_shape)
        codec.recode_mean_into(payloads, next_codec, recoded, slice_shape)
        decoded = _decoded(next_codec, recoded, slice_shape, torch.float32)
        assert not list(decoded.parts())[part][1, place].isfinite()
        assert all(row.isfinite().all() for row in (decoded.blocks[0], decoded.exact[0]))


def test_the_mean_of_the_largest_fp16_values_stays_finite_in_every_pair_of_codecs() -> None:
    largest = torch.finfo(torch.float16).max
    for codec, next_codec in itertools.product(
        [_codec(4, 32, torch.float16), _codec(8, 32, torch.float16), CastCodec(torch.float16)], repeat=2
    ):
        values = Regions.of(torch.full((40,), largest, dtype=torch.float16), SliceShape(32, 8))
        payloads = torch.stack([_encoded(codec, values)] * 8)
        recoded = _payloads(next_codec, 1, slice_shape=values.slice_shape)
        codec.recode_mean_into(payloads, next_codec, recoded, values.slice_shape)
        assert torch.equal(
            _flat(_decoded(next_codec, recoded, values.slice_shape, torch.float16)), torch.full((40,), largest, dtype=torch.float16)
        )


# ---- rotation and stochastic rounding


def _all_options(bits: int, block_numel: int) -> list[BlockCodec]:
    return [
        BlockCodec(code(bits, CodeOptions(is_rotated, key is not None)), block_numel, CastCodec(torch.float32), key)
        for is_rotated in (False, True)
        for key in (None, 0, 99)
    ]


def test_options_are_made_for_block_codecs_alone_and_a_stochastic_one_starts_with_key_0() -> None:
    exact = CastCodec(torch.bfloat16)
    assert make_codec(Code(4), torch.bfloat16, 64) == BlockCodec(Code(4), 64, exact, noise_key=None)
    rotated, stochastic = Code(4, Rotation.HADAMARD), Code(8, rounding=Rounding.STOCHASTIC)
    assert make_codec(rotated, torch.bfloat16, 64) == BlockCodec(rotated, 64, exact, noise_key=None)
    assert make_codec(stochastic, torch.bfloat16, 64) == BlockCodec(stochastic, 64, exact, noise_key=0)
    assert make_codec(EXACT, torch.bfloat16, 64) == exact


def test_a_key_changes_what_a_stochastic_codec_draws_and_nothing_of_one_that_rounds_to_nearest() -> None:
    for codec in [*_all_options(4, 32), CastCodec(torch.float32)]:
        other = codec.with_noise(2**63 - 1)
        if isinstance(codec, BlockCodec) and codec.noise_key is not None:
            assert other == replace(codec, noise_key=2**63 - 1)
        else:
            assert other is codec


@pytest.mark.parametrize("codec", _all_options(4, 64), ids=str)
def test_options_change_neither_the_size_of_a_payload_nor_its_exact_values(codec: BlockCodec) -> None:
    plain, values = _codec(4, 64), _values(3, SliceShape(192, 7), torch.float32, seed=13)
    payloads, plain_payloads = _encoded(codec, values), _encoded(plain, values)
    assert payloads.shape == plain_payloads.shape
    assert _same_bits(codec.exact_values(payloads, values.slice_shape), plain.exact_values(plain_payloads, values.slice_shape))
    assert torch.equal(payloads, plain_payloads) == (codec == plain)


@pytest.mark.parametrize("codec", _all_options(8, 64), ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_codec_decodes_what_it_encoded_within_a_step_of_every_hop(codec: BlockCodec, dtype: torch.dtype) -> None:
    values = _values(2, SliceShape(192, 5), dtype, seed=14)
    payloads = _encoded(codec, values)
    mean = Regions.of(torch.empty(2 * 197), values.slice_shape)
    codec.decode_mean_into(payloads.unsqueeze(0), mean, accumulate=False)
    assert torch.equal(_flat(_decoded(codec, payloads, values.slice_shape, dtype)), _flat(mean).to(dtype))
    # Stochastic rounding errs by up to a step. What was rotated comes back with averages of 32 errors, and with fp32 sums rounded 10 times.
    encoded = rotated(values.blocks) if codec.is_rotated else values.blocks
    bound = 2 * worst_error(encoded, 8, 64) * (1 + 20 * 127 * ROUNDOFF)
    assert ((mean.blocks.double() - values.blocks.double()).abs() <= bound).all()


def test_rotation_spreads_errors_onto_the_padding_of_a_group_of_32() -> None:
    codec = BlockCodec(Code(4, Rotation.HADAMARD), 64, CastCodec(torch.float32))
    values = _values(1, SliceShape(128, 0), torch.float32, seed=15)
    values.blocks[0, 85:] = 0.0
    decoded = _decoded(codec, _encoded(codec, values), values.slice_shape, torch.float32).blocks[0]
    assert decoded[85:96].any() and not decoded[96:].any()


@pytest.mark.parametrize("next_codec", [_all_options(4, 64)[5], _all_options(4, 32)[3], _all_options(8, 64)[2]], ids=str)
def test_two_hops_of_rotated_codecs_end_within_their_steps_whether_the_middle_is_fused_or_not(next_codec: BlockCodec) -> None:
    codec = BlockCodec(Code(4, Rotation.HADAMARD, Rounding.STOCHASTIC), 64, CastCodec(torch.float32), noise_key=3)
    slice_shape = SliceShape(384, 3)
    sent, payloads = _sent(codec, slice_shape, torch.float32, members=3, slices=2)
    recoded = _payloads(next_codec, 2, slice_shape=slice_shape)
    codec.recode_mean_into(payloads, next_codec, recoded, slice_shape)
    decoded = _decoded(next_codec, recoded, slice_shape, torch.float32)
    # Stochastic rounding errs by up to a step. What was rotated comes back with averages of 32 errors, so a step of the first hop bounds
    # the mean before the second hop in both spaces; fp32 sums are rounded 20 times.
    blocks = torch.stack([values.blocks for values in sent])
    true_mean = blocks.double().mean(0)
    first_step = 2 * worst_error(rotated(blocks), 4, 64).mean(0)
    reached = (rotated(true_mean) if next_codec.is_rotated else true_mean).abs() + first_step
    second_step = 2 * worst_error(reached, next_codec.bits, next_codec.block_numel)
    bound = (first_step + second_step) * (1 + 40 * largest_code(next_codec.bits) * ROUNDOFF)
    assert ((decoded.blocks.double() - true_mean).abs() <= bound).all()
