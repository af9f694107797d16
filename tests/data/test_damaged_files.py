"""A corpus with damaged bytes is refused by name, or it is read exactly as its files describe it, without a read beyond them."""

import random
import struct
from pathlib import Path

import numpy as np
import pytest
from harness.tiny_corpus import write_corpus

from megatron_zpp.data.indexed_dataset import IndexedDataset, check_token_ids

NUMPY_NAMES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def damaged(content: bytes, rng: random.Random) -> bytes:
    kind = rng.randrange(5)
    if kind == 0:
        return content[: rng.randrange(len(content) + 1)]
    if kind == 1:
        return content + rng.randbytes(rng.randrange(1, 40))
    changed = bytearray(content)
    # Half of the changes hit the header and the first lengths.
    places = [rng.randrange(min(len(changed), 60) if rng.random() < 0.5 else len(changed)) for _ in range(rng.randrange(1, 4))]
    for place in places:
        value = rng.choice([rng.randbytes(1), b"\0", b"\xff", struct.pack("<i", -1), struct.pack("<q", rng.choice([-8, 2**62, 2**31]))])
        changed[place : place + len(value)] = value
    return bytes(changed[: len(content)]) if kind < 4 else bytes(changed)


def expected_sequences(prefix: str) -> list[list[int]]:
    """The sequences that the bytes of both files describe, unpacked value by value."""
    index, tokens = (Path(f"{prefix}.{ending}").read_bytes() for ending in ("idx", "bin"))
    code, count = struct.unpack_from("<BQ", index, 17)
    dtype = np.dtype(NUMPY_NAMES[code])
    lengths = struct.unpack_from(f"<{count}i", index, 34)
    offsets = struct.unpack_from(f"<{count}q", index, 34 + 4 * count)
    parts = [tokens[offset : offset + length * dtype.itemsize] for offset, length in zip(offsets, lengths, strict=True)]
    assert sum(map(len, parts)) == len(tokens)
    return [np.frombuffer(part, dtype).tolist() for part in parts]


def damage_and_read(folder: Path, rounds: int, seed: int) -> tuple[int, int]:
    """How many damaged corpora were refused, and how many were read."""
    rng = random.Random(seed)
    refused = read = 0
    for number in range(rounds):
        documents = [[rng.randrange(50) for _ in range(rng.choice([0, 1, 3, 200]))] for _ in range(rng.randrange(1, 12))]
        prefix = write_corpus(folder, documents, rng.choice(["uint16", "int32"]), name=f"corpus{number}")
        for ending in rng.choice([("idx",), ("idx",), ("bin",), ("idx", "bin")]):
            path = Path(f"{prefix}.{ending}")
            if path.stat().st_size:
                path.write_bytes(damaged(path.read_bytes(), rng))
        message = prefix
        try:
            dataset = IndexedDataset(prefix)
            assert [dataset.read(i).tolist() for i in range(len(dataset))] == expected_sequences(prefix)
            read += 1
            check_token_ids(dataset, 50)
        except ValueError as error:
            message = str(error)
            refused += 1
        assert prefix in message
        for ending in ("bin", "idx"):
            Path(f"{prefix}.{ending}").unlink()
    return refused, read


def test_200_damaged_corpora_are_refused_or_read_as_they_are(tmp_path: Path) -> None:
    refused, read = damage_and_read(tmp_path, 200, seed=1)
    assert refused > 100
    assert read > 10


@pytest.mark.long
def test_2000_damaged_corpora_are_refused_or_read_as_they_are(tmp_path: Path) -> None:
    refused, read = damage_and_read(tmp_path, 2000, seed=2)
    assert refused > 1000
    assert read > 100
