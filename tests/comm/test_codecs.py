from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_zpp.comm.codecs import CastCodec, Regions, SliceShape

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
UNIT_ROUNDOFF = 2.0**-24  # of fp32
slice_shapes = st.builds(SliceShape, st.integers(0, 40), st.integers(0, 40)).filter(lambda slice_shape: slice_shape.numel > 0)


def _values(slices: int, slice_shape: SliceShape, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Regions:
    generator = torch.Generator().manual_seed(seed)
    return Regions.of((torch.randn(slices * slice_shape.numel, generator=generator) * scale).to(dtype), slice_shape)


def _payloads(codec: CastCodec, *shape: int, slice_shape: SliceShape) -> Tensor:
    return torch.full((*shape, codec.payload_bytes(slice_shape)), 0xAB, dtype=torch.uint8)


def _flat(regions: Regions) -> Tensor:
    return torch.cat([regions.blocks.flatten(), regions.exact.flatten()])


@given(slice_shapes, st.sampled_from(DTYPES))
def test_a_payload_is_its_two_regions_each_padded_to_16_bytes(slice_shape: SliceShape, dtype: torch.dtype) -> None:
    element_bytes = torch.finfo(dtype).bits // 8
    padded = [
        next(size for size in range(0, 1000, 16) if size >= numel * element_bytes) for numel in (slice_shape.blocks, slice_shape.exact)
    ]
    assert CastCodec(dtype).payload_bytes(slice_shape) == sum(padded)


@given(slice_shapes, st.integers(1, 5), st.sampled_from(DTYPES))
def test_values_of_the_codecs_own_dtype_come_back_bit_for_bit(slice_shape: SliceShape, slices: int, dtype: torch.dtype) -> None:
    codec = CastCodec(dtype)
    values = _values(slices, slice_shape, dtype, seed=1)
    payloads = _payloads(codec, slices, slice_shape=slice_shape)
    codec.encode_into(values, payloads)
    decoded = Regions.of(torch.empty(slices * slice_shape.numel, dtype=dtype), slice_shape)
    codec.decode_into(payloads, decoded)
    assert torch.equal(_flat(decoded).view(torch.uint8), _flat(values).view(torch.uint8))


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("between", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_other_dtypes_are_cast_once_on_the_way_in_and_once_on_the_way_out(
    source: torch.dtype, between: torch.dtype, target: torch.dtype
) -> None:
    slice_shape = SliceShape(24, 5)
    values = _values(3, slice_shape, source, seed=2)
    payloads = _payloads(CastCodec(between), 3, slice_shape=slice_shape)
    CastCodec(between).encode_into(values, payloads)
    decoded = Regions.of(torch.empty(3 * slice_shape.numel, dtype=target), slice_shape)
    CastCodec(between).decode_into(payloads, decoded)
    assert torch.equal(_flat(decoded), _flat(values).to(between).to(target))


def test_each_slice_has_a_payload_of_its_own() -> None:
    slice_shape = SliceShape(8, 3)
    values = _values(4, slice_shape, torch.float32, seed=3)
    codec = CastCodec(torch.float32)
    together = _payloads(codec, 4, slice_shape=slice_shape)
    codec.encode_into(values, together)
    for index in range(4):
        alone = _payloads(codec, 1, slice_shape=slice_shape)
        codec.encode_into(values.slice_at(index), alone)
        assert torch.equal(alone[0], together[index])


@settings(max_examples=60)
@given(slice_shapes, st.integers(1, 7), st.integers(1, 4), st.sampled_from(DTYPES), st.booleans())
def test_the_mean_bit_equals_an_ordered_fp32_sum_divided_by_the_members(
    slice_shape: SliceShape, members: int, slices: int, dtype: torch.dtype, accumulate: bool
) -> None:
    mean, sent, before = _decoded_mean(slice_shape, members, slices, dtype, accumulate)
    expected = sent[0].float()
    for values in sent[1:]:
        expected = expected + values.float()
    expected = expected / members
    assert torch.equal(mean, before + expected if accumulate else expected)


@settings(max_examples=60)
@given(slice_shapes, st.integers(1, 7), st.integers(1, 4), st.sampled_from(DTYPES), st.booleans())
def test_the_mean_is_the_fp64_mean_within_the_rounding_of_its_operations(
    slice_shape: SliceShape, members: int, slices: int, dtype: torch.dtype, accumulate: bool
) -> None:
    mean, sent, before = _decoded_mean(slice_shape, members, slices, dtype, accumulate)
    exact = torch.stack([values.double() for values in sent]).mean(0)
    # members - 1 sums, a division and perhaps an addition round once each, none of a result above the sum of magnitudes
    magnitude = torch.stack([values.double().abs() for values in sent]).mean(0) + before.double().abs()
    bound = (members + 1) * UNIT_ROUNDOFF * 1.001 * magnitude
    assert ((mean.double() - exact - (before.double() if accumulate else 0)).abs() <= bound).all()


def _decoded_mean(
    slice_shape: SliceShape, members: int, slices: int, dtype: torch.dtype, accumulate: bool
) -> tuple[Tensor, list[Tensor], Tensor]:
    codec = CastCodec(dtype)
    sent = [_values(slices, slice_shape, dtype, seed=10 + member, scale=4.0**member) for member in range(members)]
    payloads = _payloads(codec, members, slices, slice_shape=slice_shape)
    for member, values in enumerate(sent):
        codec.encode_into(values, payloads[member])
    mean = _values(slices, slice_shape, torch.float32, seed=5)
    before = _flat(mean).clone()
    codec.decode_mean_into(payloads, mean, accumulate=accumulate)
    return _flat(mean), [_flat(values) for values in sent], before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_pass_and_stay_where_they_are(dtype: torch.dtype, bad: float) -> None:
    slice_shape = SliceShape(6, 4)
    sent = [_values(2, slice_shape, dtype, seed=member) for member in range(3)]
    sent[1].blocks[1, 2] = bad
    sent[2].exact[0, 3] = bad
    payloads = _payloads(CastCodec(dtype), 3, 2, slice_shape=slice_shape)
    for member, values in enumerate(sent):
        CastCodec(dtype).encode_into(values, payloads[member])
    mean = Regions.of(torch.zeros(2 * slice_shape.numel), slice_shape)
    CastCodec(dtype).decode_mean_into(payloads, mean, accumulate=True)
    expected = torch.tensor([bad, bad])
    assert torch.equal(torch.stack([mean.blocks[1, 2], mean.exact[0, 3]]).nan_to_num(7.0), expected.nan_to_num(7.0))
    assert int((~_flat(mean).isfinite()).sum()) == 2


def test_the_mean_of_large_fp16_values_does_not_overflow() -> None:
    slice_shape = SliceShape(4, 4)
    payloads = _payloads(CastCodec(torch.float16), 8, 1, slice_shape=slice_shape)
    for member in range(8):
        CastCodec(torch.float16).encode_into(Regions.of(torch.full((8,), 60000.0, dtype=torch.float16), slice_shape), payloads[member])
    mean = Regions.of(torch.empty(8), slice_shape)
    CastCodec(torch.float16).decode_mean_into(payloads, mean, accumulate=False)
    assert torch.equal(_flat(mean), torch.full((8,), torch.tensor(60000.0, dtype=torch.float16).item()))


def test_the_middle_of_a_descent_takes_the_mean_in_fp32_before_it_encodes() -> None:
    slice_shape = SliceShape(5, 3)
    sent = [_values(2, slice_shape, torch.float16, seed=member, scale=20000.0) for member in range(4)]
    payloads = _payloads(CastCodec(torch.float16), 4, 2, slice_shape=slice_shape)
    for member, values in enumerate(sent):
        CastCodec(torch.float16).encode_into(values, payloads[member])
    recoded = _payloads(CastCodec(torch.bfloat16), 2, slice_shape=slice_shape)
    CastCodec(torch.float16).recode_mean_into(payloads, CastCodec(torch.bfloat16), recoded, slice_shape)
    decoded = Regions.of(torch.empty(2 * slice_shape.numel), slice_shape)
    CastCodec(torch.bfloat16).decode_into(recoded, decoded)
    total = _flat(sent[0]).float()
    for values in sent[1:]:
        total += _flat(values).float()
    assert torch.equal(_flat(decoded), (total / 4).bfloat16().float())


@given(slice_shapes, st.integers(1, 4), st.data())
def test_a_range_of_regions_is_that_range_of_their_flat_buffer(slice_shape: SliceShape, slices: int, data: st.DataObject) -> None:
    flat = torch.arange(slices * slice_shape.numel)
    boundary = slices * slice_shape.blocks
    low, high = data.draw(st.sampled_from([(0, boundary), (boundary, flat.numel())]))
    start = data.draw(st.integers(low, high))
    stop = data.draw(st.integers(start, high))
    assert torch.equal(Regions.of(flat, slice_shape).range(start, stop), flat[start:stop])


def test_a_range_across_the_regions_is_refused() -> None:
    with pytest.raises(RuntimeError, match="elements 5 to 7 span the regions, which meet at 6"):
        Regions.of(torch.arange(10), SliceShape(3, 2)).range(5, 7)
