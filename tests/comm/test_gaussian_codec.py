from __future__ import annotations

import itertools
from dataclasses import replace
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_zpp.comm.backend import VirtualBackend, VirtualWorld
from megatron_zpp.comm.code import EXACT, Code, Levels, LinkCodes, Rotation, Rounding, SliceShape
from megatron_zpp.comm.codec import Codec, Regions, SignKeys
from megatron_zpp.comm.codecs import KEY_BITS, BlockCodec, CastCodec, LinkCodecs, make_codec, sign_keys
from megatron_zpp.comm.gaussian_codec import GaussianCodec
from megatron_zpp.comm.lanes import ThreadLanes
from megatron_zpp.comm.ledger import Ledger
from megatron_zpp.comm.links import Links
from megatron_zpp.ops.gaussian import decode_gaussian, decode_mean_gaussian, encode_gaussian
from megatron_zpp.ops.payload import gaussian_bytes
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.topology import Link, Topology
from megatron_zpp.system.user_error import UserError

BLOCK = 256
BITS = (1, 2, 3, 4)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ERRORS = {1: 0.568, 2: 0.131, 3: 0.0354, 4: 0.0094}
SHAPE = SliceShape(blocks=3 * BLOCK, exact=5)
CODES = [Code.gaussian(bits, rounds) for bits in BITS for rounds in (1, 2)]


def _codec(code: Code, own: int = 0, senders: tuple[int, ...] = (0,), exact: torch.dtype = torch.float32) -> Codec:
    return make_codec(code, exact, BLOCK).with_signs(SignKeys(own, senders))


def _values(slices: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Regions:
    return Regions.of(torch.randn(slices * SHAPE.numel, generator=torch.Generator().manual_seed(seed)).to(dtype), SHAPE)


def _empty(slices: int, dtype: torch.dtype = torch.float32) -> Regions:
    return Regions.of(torch.full((slices * SHAPE.numel,), 7.0, dtype=dtype), SHAPE)


def _encoded(codec: Codec, values: Regions) -> Tensor:
    payloads = torch.full((values.slices, codec.payload_bytes(values.slice_shape)), 0xAB, dtype=torch.uint8)
    codec.encode_into(values, payloads)
    return payloads


def _error_share(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).square().sum() / expected.double().square().sum())


# ---- codes


@pytest.mark.parametrize("bits", [None, 0, 5, 8])
def test_bits_that_gaussian_levels_do_not_have_are_refused(bits: int | None) -> None:
    with pytest.raises(UserError, match=f"{bits} bits per value are not available with Gaussian levels; choose 1, 2, 3 or 4"):
        Code(bits, levels=Levels.GAUSSIAN, rounds=1)


@pytest.mark.parametrize("rounds", [-1, 0, 3])
def test_gaussian_levels_need_one_or_two_rounds_of_rotation(rounds: int) -> None:
    with pytest.raises(UserError, match=f"{rounds} rounds of rotation are not available with Gaussian levels; choose 1 or 2"):
        Code.gaussian(3, rounds)


def test_rounds_belong_to_gaussian_levels_and_other_rotations_and_roundings_do_not() -> None:
    with pytest.raises(UserError, match="2 rounds of rotation need Gaussian levels"):
        Code(4, rounds=2)
    for change in ({"rotation": Rotation.HADAMARD}, {"rounding": Rounding.STOCHASTIC}):
        with pytest.raises(UserError, match="choose no other rotation or rounding"):
            Code(4, levels=Levels.GAUSSIAN, rounds=1, **change)


def test_codes_of_as_many_bits_with_other_levels_or_rounds_are_other_codes() -> None:
    codes = [Code(4), Code.gaussian(4, 1), Code.gaussian(4, 2)]
    assert len(set(codes)) == 3
    codecs = [make_codec(code, torch.bfloat16, BLOCK) for code in codes]
    assert all(left != right for left, right in itertools.combinations(codecs, 2))
    assert make_codec(codes[1], torch.bfloat16, BLOCK) == GaussianCodec(codes[1], BLOCK, CastCodec(torch.bfloat16))


def test_a_codec_of_uniform_levels_takes_no_other_code() -> None:
    with pytest.raises(RuntimeError, match="a codec of blocks cannot have"):
        BlockCodec(Code.gaussian(4, 1), BLOCK, CastCodec(torch.float32))
    with pytest.raises(RuntimeError, match="a Gaussian codec cannot have"):
        GaussianCodec(Code(4), BLOCK, CastCodec(torch.float32))


@pytest.mark.parametrize("block_numel", [32, 128, 384])
def test_a_block_size_that_is_no_multiple_of_256_is_refused_with_the_flag_s_name(block_numel: int) -> None:
    with pytest.raises(UserError, match=f"--quantization-block-size {block_numel} does not suit Gaussian codes.*choose a multiple of 256"):
        make_codec(Code.gaussian(3, 1), torch.bfloat16, block_numel)


# ---- payloads


@given(st.integers(0, 12), st.integers(0, 40), st.sampled_from(CODES), st.sampled_from(DTYPES))
def test_a_payload_is_scales_codes_and_the_exact_run_each_padded_to_16_bytes(
    blocks: int, exact: int, code: Code, dtype: torch.dtype
) -> None:
    slice_shape = SliceShape(blocks * BLOCK, exact)
    expected = gaussian_bytes(blocks * BLOCK, cast(int, code.bits)) + -(-exact * dtype.itemsize // 16) * 16
    assert make_codec(code, dtype, 512).payload_bytes(slice_shape) == expected
    assert code.payload_bytes(slice_shape, element_bytes=dtype.itemsize, block_numel=512) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("code", CODES)
def test_blocks_arrive_with_the_error_of_their_code_and_the_exact_run_bit_for_bit(code: Code, dtype: torch.dtype) -> None:
    senders = (11, 12, 13)
    payloads = torch.cat([_encoded(_codec(code, key, exact=dtype), _values(1, key, dtype)) for key in senders])
    arrived = _empty(3, dtype)
    _codec(code, senders=senders, exact=dtype).decode_into(payloads, arrived)
    for row, key in enumerate(senders):
        sent = _values(1, key, dtype)
        assert torch.equal(arrived.exact[row], sent.exact[0])
        assert _error_share(arrived.blocks[row], sent.blocks[0]) < 1.3 * ERRORS[cast(int, code.bits)]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("code", CODES)
def test_the_mean_is_that_of_the_decoded_messages_in_their_order(code: Code, accumulate: bool) -> None:
    senders = (5, 6, 7)
    payloads = torch.stack([_encoded(_codec(code, key), _values(2, key)) for key in senders])
    mean = _empty(2)
    _codec(code, senders=senders).decode_mean_into(payloads, mean, accumulate=accumulate)
    blocks, exact = torch.zeros(2, SHAPE.blocks), torch.zeros(2, SHAPE.exact)
    for message, key in zip(payloads, senders, strict=True):
        arrived = torch.empty(2, SHAPE.blocks)
        decode_gaussian(message, arrived, bits=cast(int, code.bits), rounds=code.rounds, keys=[key, key])
        blocks += arrived
        exact += _values(2, key).exact
    before = 7.0 if accumulate else 0.0
    assert torch.equal(mean.blocks, blocks / 3 + before) and torch.equal(mean.exact, exact / 3 + before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_differences_are_added_to_the_blocks_and_the_exact_run_is_replaced(dtype: torch.dtype) -> None:
    code, sent, copy = Code.gaussian(3, 1), _values(2, 1), _values(2, 2, dtype)
    payloads = torch.cat([_encoded(_codec(code, key, exact=dtype), sent.slice_at(key)) for key in (0, 1)])
    arrived = _empty(2)
    codec = _codec(code, senders=(0, 1), exact=dtype)
    codec.decode_into(payloads, arrived)
    expected = (copy.blocks.float() + arrived.blocks).to(dtype)
    cast(GaussianCodec, codec).add_into(payloads, copy)
    assert torch.equal(copy.blocks, expected) and torch.equal(copy.exact, sent.exact.to(dtype))


def test_a_mean_in_eight_bits_is_encoded_again_in_gaussian_codes_from_fp32() -> None:
    within, across = BlockCodec(Code(8), BLOCK, CastCodec(torch.float32)), _codec(Code.gaussian(3, 2), own=9)
    payloads = torch.stack([_encoded(within, _values(2, seed)) for seed in (1, 2)])
    mean = _empty(2)
    within.decode_mean_into(payloads, mean, accumulate=False)
    recoded = torch.full((2, across.payload_bytes(SHAPE)), 0xAB, dtype=torch.uint8)
    within.recode_mean_into(payloads, across, recoded, SHAPE)
    assert torch.equal(recoded, _encoded(across, mean))


# ---- signs


def test_a_codec_without_keys_neither_encodes_nor_decodes() -> None:
    codec, values = make_codec(Code.gaussian(3, 1), torch.float32, BLOCK), _values(1)
    payloads = torch.zeros(1, codec.payload_bytes(SHAPE), dtype=torch.uint8)
    for call in (
        lambda: codec.encode_into(values, payloads),
        lambda: codec.decode_into(payloads, values),
        lambda: codec.decode_mean_into(payloads.unsqueeze(0), values, accumulate=False),
    ):
        with pytest.raises(RuntimeError, match="has no keys of signs"):
            call()


def test_messages_and_senders_must_be_equally_many() -> None:
    codec = _codec(Code.gaussian(3, 1), senders=(1, 2))
    payloads = torch.zeros(3, codec.payload_bytes(SHAPE), dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="3 messages came from 2 senders"):
        codec.decode_into(payloads, _empty(3))
    with pytest.raises(RuntimeError, match="1 messages came from 2 senders"):
        codec.decode_mean_into(payloads.unsqueeze(0), _empty(3), accumulate=False)


@pytest.mark.parametrize("link", [Link.INTER, Link.INTRA])
def test_all_members_of_a_link_know_the_keys_of_all_and_each_has_its_own(link: Link) -> None:
    topology = Topology.of_nodes(3, 2)
    for rank in range(6):
        members = topology.members(link, rank)
        keys = [sign_keys(1, link, topology, member, "DESCEND", "block.0", 3, 1) for member in members]
        assert len({key.senders for key in keys}) == 1
        assert tuple(key.own for key in keys) == keys[0].senders and len(set(keys[0].senders)) == len(members)
        assert all(0 <= key < 2**KEY_BITS for key in keys[0].senders)


def test_signs_differ_with_seed_link_direction_unit_iteration_micro_batch_and_sender() -> None:
    topology = Topology.of_nodes(2, 2)
    places = itertools.product((1, 2), Link.__members__.values(), range(4), ("climb", "descend"), ("block.0", "norm"), (0, 1), (0, 1))
    keys = [sign_keys(seed, link, topology, rank, *place).own for seed, link, rank, *place in places if link in (Link.INTER, Link.INTRA)]
    assert len(set(keys)) == len(keys) == 2 * 2 * 4 * 2 * 2 * 2 * 2


def test_only_gaussian_codecs_take_keys_of_signs_and_they_ignore_those_of_rounding() -> None:
    keys = SignKeys(1, (1, 2))
    plain = make_codec(EXACT, torch.float32, BLOCK)
    uniform = make_codec(Code(4, rounding=Rounding.STOCHASTIC), torch.float32, BLOCK)
    gaussian = make_codec(Code.gaussian(2, 2), torch.float32, BLOCK)
    assert plain.with_signs(keys) is plain and uniform.with_signs(keys) is uniform
    assert gaussian.with_noise(5) is gaussian and gaussian.with_signs(keys) == replace(cast(GaussianCodec, gaussian), keys=keys)


# ---- padding


def test_codecs_say_whether_errors_spread_to_the_padding_and_they_do_then() -> None:
    values = Regions(torch.zeros(1, BLOCK), torch.zeros(1, 0))
    values.blocks[0, :150] = torch.linspace(1, 2, 150)
    codes = [EXACT, Code(4), Code(4, Rotation.HADAMARD), *CODES]
    for code in codes:
        codec, mean = _codec(code), Regions(torch.empty(1, BLOCK), torch.zeros(1, 0))
        codec.decode_mean_into(_encoded(codec, values).unsqueeze(0), mean, accumulate=False)
        assert codec.mixes_neighbours == code.mixes_neighbours == bool(mean.blocks[0, 150:].any())


@pytest.mark.parametrize("inter, intra", list(itertools.product((EXACT, Code.gaussian(3, 1)), repeat=2)))
def test_the_codecs_of_two_links_mix_neighbours_if_one_of_them_does(inter: Code, intra: Code) -> None:
    codes = LinkCodes(inter, intra)
    codecs = LinkCodecs.of(codes, torch.float32, BLOCK)
    assert codecs.any_mixes_neighbours == (codes != LinkCodes())


# ---- hops


@pytest.mark.virtual
@pytest.mark.parametrize("shape", [(2, 2), (3, 1), (2, 3), (1, 2)])
def test_a_descent_in_gaussian_codes_brings_every_rank_the_mean_within_their_error(shape: tuple[int, int]) -> None:
    grid = Grid.of_nodes(*shape)
    size = shape[0] * shape[1]
    flats = [torch.randn(size * SHAPE.numel, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    codes = LinkCodes(Code.gaussian(4, 2), Code.gaussian(4, 1))

    def program(backend: VirtualBackend) -> tuple[int, Tensor]:
        links = Links(backend, ThreadLanes(), Ledger(backend.grid, backend.rank), torch.device("cpu"))
        codecs = LinkCodecs.of(codes, torch.float32, BLOCK).with_signs_for(links.topology, links.data_rank, "descend", "unit", 1, 0)
        primary = torch.zeros(SHAPE.numel)
        full = Regions.of(flats[backend.rank].clone(), SHAPE)
        links.lanes.wait(links.descend("unit", codecs, full, Regions.of(primary, SHAPE), accumulate=False)[-1])
        return links.own_slice, primary

    whole = Regions.of(torch.stack([flat.double() for flat in flats]).mean(0), SHAPE)
    for own_slice, primary in VirtualWorld(grid).run(program):
        found, expected = Regions.of(primary, SHAPE), whole.slice_at(own_slice)
        assert torch.allclose(found.exact.double(), expected.exact, atol=1e-6)
        # Each hop has its own error, and 768 values are few.
        assert _error_share(found.blocks, expected.blocks) < 1.3 * 2 * ERRORS[4]


def test_ops_and_codec_give_the_same_bytes() -> None:
    code, values = Code.gaussian(2, 2), _values(2)
    payloads = _encoded(_codec(code, own=42), values)
    expected = torch.zeros(2, gaussian_bytes(SHAPE.blocks, 2), dtype=torch.uint8)
    encode_gaussian(values.blocks, expected, bits=2, rounds=2, key=42)
    written = 6  # bytes of scales, before their padding
    for part in (slice(0, written), slice(16, expected.shape[1])):
        assert torch.equal(payloads[:, part], expected[:, part])
    mean = torch.empty_like(values.blocks)
    decode_mean_gaussian(payloads.unsqueeze(0), mean, bits=2, rounds=2, keys=[42], accumulate=False)
    assert _error_share(mean, values.blocks) < 1.3 * ERRORS[2]


def test_a_codec_of_one_sender_decodes_what_the_codec_of_all_decodes_from_that_sender() -> None:
    keys = SignKeys(5, (3, 5, 9))
    codec = make_codec(Code.gaussian(3, rounds=1), torch.float32, BLOCK).with_signs(keys)
    values = Regions.of(torch.randn(3 * BLOCK, generator=torch.Generator().manual_seed(1)), SliceShape(BLOCK, 0))
    payloads = torch.zeros(3, codec.payload_bytes(values.slice_shape), dtype=torch.uint8)
    for member, sender in enumerate(keys.senders):
        make_codec(Code.gaussian(3, rounds=1), torch.float32, BLOCK).with_signs(SignKeys(sender, keys.senders)).encode_into(
            values.slice_at(member), payloads[member : member + 1]
        )
    together = Regions.of(torch.zeros(3 * BLOCK), SliceShape(BLOCK, 0))
    codec.decode_into(payloads, together)
    for member in range(3):
        alone = Regions.of(torch.zeros(BLOCK), SliceShape(BLOCK, 0))
        codec.of_sender(member).decode_into(payloads[member : member + 1], alone)
        assert torch.equal(alone.blocks, together.slice_at(member).blocks)
