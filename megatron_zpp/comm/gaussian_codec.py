"""The codec of Gaussian codes: 1 to 4 bits per value, after a rotation with random signs that every sender draws for itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, cast

from torch import Tensor

from megatron_zpp.comm.code import Code, Levels, SliceShape
from megatron_zpp.comm.codec import Codec, Regions, SignKeys
from megatron_zpp.ops.gaussian import decode_gaussian, decode_mean_gaussian, encode_gaussian
from megatron_zpp.ops.payload import GAUSSIAN_BLOCK_NUMEL
from megatron_zpp.system.user_error import UserError


@dataclass(frozen=True)
class GaussianCodec(Codec):
    """Encodes the blocks in Gaussian codes, and the exact values by the codec `exact`.

        | scales bf16, padded to 16 bytes | codes | exact values, padded to 16 bytes |

    Values decode only with the sender's signs, so each message is decoded and rotated back before messages are summed. A decoded block
    has errors in its padding too (mixes_neighbours).
    code: with Gaussian levels. block_numel: of the layout; a multiple of 256. keys: of the signs, set by `with_signs` for every hop.
    Raises UserError for another block_numel.
    """

    code: Code
    block_numel: int
    exact: Codec
    keys: SignKeys | None = None
    encoding_is_costly: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.code.levels is not Levels.GAUSSIAN:
            raise RuntimeError(f"a Gaussian codec cannot have {self.code}")
        if self.block_numel <= 0 or self.block_numel % GAUSSIAN_BLOCK_NUMEL:
            raise UserError(
                f"--quantization-block-size {self.block_numel} does not suit Gaussian codes, whose blocks have {GAUSSIAN_BLOCK_NUMEL} "
                f"values; choose a multiple of {GAUSSIAN_BLOCK_NUMEL}."
            )

    @property
    def bits(self) -> int:
        return cast(int, self.code.bits)

    @property
    def mixes_neighbours(self) -> bool:
        return self.code.mixes_neighbours

    def payload_bytes(self, slice_shape: SliceShape) -> int:
        return self._exact_offset(slice_shape) + self.exact.payload_bytes(SliceShape(0, slice_shape.exact))

    def encode_into(self, values: Regions, payloads: Tensor) -> None:
        encode_gaussian(values.blocks, payloads, bits=self.bits, rounds=self.code.rounds, key=self._keys().own)
        self.exact.encode_into(_exact_of(values), payloads[:, self._exact_offset(values.slice_shape) :])

    def decode_into(self, payloads: Tensor, values: Regions) -> None:
        """Decodes payloads [slices, payload_bytes], one from each sender in turn, into `values`."""
        self._decode(payloads, values.blocks, accumulate=False)
        self.exact.decode_into(payloads[:, self._exact_offset(values.slice_shape) :], _exact_of(values))

    def decode_mean_into(self, payloads: Tensor, mean: Regions, *, accumulate: bool) -> None:
        keys = self._keys_of_senders(payloads.shape[0])
        decode_mean_gaussian(payloads, mean.blocks, bits=self.bits, rounds=self.code.rounds, keys=keys, accumulate=accumulate)
        exact_values = payloads[..., self._exact_offset(mean.slice_shape) :]
        self.exact.decode_mean_into(exact_values, _exact_of(mean), accumulate=accumulate)

    def add_into(self, payloads: Tensor, values: Regions) -> None:
        self._decode(payloads, values.blocks, accumulate=True)
        self.exact.decode_into(payloads[:, self._exact_offset(values.slice_shape) :], _exact_of(values))

    def with_signs(self, keys: SignKeys) -> GaussianCodec:
        return replace(self, keys=keys)

    def of_sender(self, member: int) -> GaussianCodec:
        keys = self._keys()
        return replace(self, keys=SignKeys(keys.own, (keys.senders[member],)))

    def _decode(self, payloads: Tensor, blocks: Tensor, *, accumulate: bool) -> None:
        keys = self._keys_of_senders(payloads.shape[0])
        decode_gaussian(payloads, blocks, bits=self.bits, rounds=self.code.rounds, keys=keys, accumulate=accumulate)

    def _exact_offset(self, slice_shape: SliceShape) -> int:
        return self.code.blocks_bytes(slice_shape.blocks, element_bytes=0)

    def _keys(self) -> SignKeys:
        if self.keys is None:
            raise RuntimeError(f"the codec of {self.code} has no keys of signs; `with_signs` sets them for every hop")
        return self.keys

    def _keys_of_senders(self, messages: int) -> Sequence[int]:
        senders = self._keys().senders
        if messages != len(senders):
            raise RuntimeError(f"{messages} messages came from {len(senders)} senders; each sender sends one")
        return senders


def _exact_of(values: Regions) -> Regions:
    """The exact values alone: as a payload of its own, it follows the blocks in each row."""
    return Regions(values.blocks[:, :0], values.exact)
