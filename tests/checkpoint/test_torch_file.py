"""Files of torch.save are read without unpickling: what torch writes gives its tensors, what torch does not write gives one error."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import re
import sys
import tracemalloc
import zipfile
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._utils import _rebuild_tensor_v2
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_zpp.checkpoint.megatron import pickled as pickled_module
from megatron_zpp.checkpoint.megatron import torch_file as torch_file_module
from megatron_zpp.checkpoint.megatron.pickled import (
    FREE_BYTES,
    RECORD_BYTES_PER_BYTE,
    Dictionary,
    Global,
    Made,
    PickleError,
    members_of,
    read_pickle,
)
from megatron_zpp.checkpoint.megatron.torch_file import TorchFile
from megatron_zpp.checkpoint.megatron.torch_zip import Bytes, zip_members
from megatron_zpp.checkpoint.megatron.window import Window
from megatron_zpp.system.user_error import UserError

INTERPRETER_BYTES = 100_000  # what reading takes besides records
WHOLE = torch.arange(35, dtype=torch.float32).reshape(5, 7)
SAVED = {
    "args": argparse.Namespace(layers=24, rate=0.5, name="run", paths=["a"], none=None, is_on=True),
    "model": OrderedDict(
        whole=WHOLE, turned=WHOLE.t(), inner=WHOLE[1:3, 2:4], bf16=WHOLE.bfloat16(), fp16=WHOLE.half(), parameter=torch.nn.Parameter(WHOLE),
        empty=torch.empty(0, 3), scalar=torch.tensor(2.5),
    ),
    "numbers": torch.arange(3),
}  # fmt: skip


def message_of(error: type[Exception], call: Callable[[], object]) -> str | None:
    """What the error of a call says; None if it returns."""
    try:
        call()
    except error as caught:
        return str(caught)
    return None


class Call:
    """Asks the reader of its pickle for a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.request = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.request


class Stored:
    """The mark of a storage of floats."""

    def __init__(self, numel: int, key: str = "0") -> None:
        self.identity = ("storage", torch.FloatStorage, key, "cpu", numel)


class Pickler(pickle.Pickler):
    def persistent_id(self, value: object) -> object:
        return value.identity if isinstance(value, Stored) else None


def pickled(value: object, protocol: int = 2) -> bytes:
    file = io.BytesIO()
    Pickler(file, protocol).dump(value)
    return file.getvalue()


def tensor(shape: tuple[int, ...], strides: tuple[int, ...], start: int = 0, numel: int = 12) -> Call:
    return Call(_rebuild_tensor_v2, Stored(numel), start, shape, strides, False, OrderedDict())


def write(path: Path, value: object, data: bytes = bytes(48), compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled(value))
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", data)
    return path


def opened(path: Path) -> TorchFile:
    return TorchFile(Window(path))


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("is_zip", [True, False])
def test_a_file_of_torch_gives_its_tensors_and_arguments(tmp_path: Path, protocol: int, is_zip: bool) -> None:
    torch.save(SAVED, tmp_path / "file", pickle_protocol=protocol, _use_new_zipfile_serialization=is_zip)
    file = opened(tmp_path / "file")
    members = members_of(file.root)
    assert members_of(members["args"]) == vars(SAVED["args"])
    model = members_of(members["model"])
    assert model.keys() == SAVED["model"].keys()
    for name, expected in SAVED["model"].items():
        place = file.place_of(model[name])
        assert place is not None
        found = file.read(place)
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    assert file.place_of(members["numbers"]) is None  # whole numbers are no weights
    assert file.place_of(members["args"]) is None


@pytest.mark.parametrize("protocol", range(6))
def test_a_request_to_call_is_a_record_and_is_not_followed(tmp_path: Path, protocol: int) -> None:
    trace = tmp_path / "trace"
    for call in (Call(os.system, f"touch {trace}"), Call(eval, f"open({str(trace)!r}, 'w')"), Call(getattr, os, "remove")):
        try:
            data = pickle.dumps([call, {"key": call}], protocol)
        except TypeError:  # a module cannot be pickled, which was the third request
            continue
        (first, second) = read_pickle(io.BytesIO(data)).root
        assert isinstance(first, Made) and isinstance(first.by, Global)
        assert isinstance(second, Dictionary)
    assert not trace.exists()


@pytest.mark.parametrize("protocol", range(6))
def test_a_number_that_no_float_can_hold_is_refused(protocol: int) -> None:
    (state,) = read_pickle(io.BytesIO(pickle.dumps([2**128], protocol))).root
    assert state == 2**128
    with pytest.raises(PickleError, match="a number of 1025 bits"):
        read_pickle(io.BytesIO(pickle.dumps([2**1024], protocol)))


def test_lists_of_another_class_are_records() -> None:
    kept, beside = read_pickle(io.BytesIO(pickle.dumps([deque([1, 2], 3), [4]]))).root
    assert isinstance(kept, Made) and kept.is_made_by("collections.deque")
    assert beside == [4]


def test_a_module_that_a_pickle_names_is_not_imported() -> None:
    read_pickle(io.BytesIO(b"cthis_module_leaves_a_trace\nfunction\n."))
    read_pickle(io.BytesIO(b"cantigravity\nfly\n(tR."))
    assert "antigravity" not in sys.modules


def plain(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(leaves, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner), max_leaves=20)


leaves = st.none() | st.booleans() | st.integers(-(2**255), 2**255) | st.floats(allow_nan=False) | st.text()
without_bytes = st.tuples(plain(leaves), st.integers(0, 2))  # whose bytes are made by calls
with_bytes = st.tuples(plain(leaves | st.binary()), st.integers(3, 5))


def simplified(record: Any) -> Any:
    if isinstance(record, Dictionary):
        return {key: simplified(value) for key, value in record.pairs}
    return type(record)(map(simplified, record)) if isinstance(record, list | tuple) else record


@given(without_bytes | with_bytes)
def test_a_pickle_of_plain_values_gives_these_values(value_and_protocol: tuple[Any, int]) -> None:
    value, protocol = value_and_protocol
    assert simplified(read_pickle(io.BytesIO(pickle.dumps(value, protocol))).root) == value


@given(st.binary(max_size=200))
def test_bytes_that_are_no_pickle_are_one_kind_of_error(data: bytes) -> None:
    for beginning in (b"", b"\x80\x02", b"\x80\x02](K\x01}"):
        message = message_of(PickleError, partial(read_pickle, io.BytesIO(beginning + data)))
        assert message is None or "is not a pickle that torch writes" in message


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02" + b"]" + b"]a" * 0 + b"(" * 50_000 + b"t" * 50_000 + b"e.",
        b"\x80\x02cm\nf\n" + b")R" * 50_000 + b".",
        b"\x80\x02cm\nf\n)R" + b"b" * 1 + b".",
        b"\x80\x02]q\x00h\x00a.",
        b"\x80\x04\x8e" + (2**62).to_bytes(8, "little") + b"abc.",
        b"\x80\x05\x96" + (2**62).to_bytes(8, "little") + b"abc.",
        b"\x80\x02\x8b\xff\xff\xff\x7fabc.",
        b"\x80\x02K\x01r\xff\xff\xff\x7f.",
        b"I" + b"9" * 100_000 + b"\n.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02" + b"2" * 1000 + b".",
    ],
    ids=["deep tuples", "deep calls", "state of nothing", "a list in itself", "bytes beyond the file", "bytearray beyond the file",
         "number beyond the file", "memo of 2^31", "number of 100,000 digits", "extension", "copies of nothing"],
)  # fmt: skip
def test_a_hostile_pickle_takes_no_memory_and_no_stack(data: bytes) -> None:
    message = message_of(PickleError, lambda: members_of(read_pickle(io.BytesIO(data)).root))
    assert message is None or len(message) < 500


# Opcodes that need nothing on the stack or what the others leave there.
SHORT_OPCODES = [b"]", b"}", b")", b"(", b"N", b"K\x01", b"\x94", b"2", b"0", b"h\x00", b"a", b"\x85", b"\x87", b"R", b"Q", b"s", b"e",
                 b"u", b"cm\nf\n", b"X\x00\x00\x00\x00", b"\x8e\x02" + bytes(9)]  # fmt: skip


def records_and_peak(data: bytes) -> tuple[str | None, int]:
    """The error of a pickle, if it has one, and the memory that reading it took."""
    tracemalloc.start()
    try:
        message = message_of(PickleError, partial(read_pickle, io.BytesIO(data)))
        return message, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@given(st.lists(st.sampled_from(SHORT_OPCODES), min_size=1, max_size=6), st.lists(st.sampled_from(SHORT_OPCODES), max_size=4))
@settings(max_examples=50)
def test_no_pickle_takes_more_memory_than_is_due_to_its_bytes(repeated: list[bytes], first: list[bytes]) -> None:
    pattern = b"".join(repeated)
    data = b"\x80\x04" + b"".join(first) + pattern * (8000 // len(pattern)) + b"N."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pickled_module, "FREE_BYTES", 1000)
        _, peak = records_and_peak(data)
    assert peak < RECORD_BYTES_PER_BYTE * len(data) + INTERPRETER_BYTES


@pytest.mark.parametrize("pattern", [b"}", b"]", b"}\x94"], ids=["dictionaries", "lists", "remembered dictionaries"])
def test_a_pickle_that_asks_for_many_times_its_size_is_refused_while_it_is_read(pattern: bytes) -> None:
    data = b"\x80\x04cm\nf\n" + pattern * (200_000 // len(pattern)) + b"."
    message, peak = records_and_peak(data)
    assert message is not None and re.search(r"its first \d+ bytes ask for \d+ bytes of memory", message)
    assert peak < FREE_BYTES + RECORD_BYTES_PER_BYTE * len(data) + INTERPRETER_BYTES


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("is_zip", [True, False])
def test_what_torch_writes_needs_three_quarters_of_the_memory_that_is_due(tmp_path: Path, protocol: int, is_zip: bool) -> None:
    layers = {f"layers.{layer}.mlp.{kind}": torch.zeros(1) for layer in range(60) for kind in ("weight", "bias")}
    saved = {**SAVED, "model": layers, "optimizer": {"param_groups": [{"params": list(range(1000))}], "state": {}}}
    torch.save(saved, tmp_path / "file", pickle_protocol=protocol, _use_new_zipfile_serialization=is_zip)
    with three_quarters_of_the_memory():
        assert len(members_of(members_of(opened(tmp_path / "file").root)["model"])) == 120


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("protocol", range(2, 6))
def test_metadata_of_many_chunks_need_three_quarters_of_the_memory_that_is_due(protocol: int, dimensions: int) -> None:
    sizes = torch.Size([8] * dimensions)
    tensors, places = {}, {}
    for name in ("a", "b"):
        offsets = [torch.Size([8 * chunk, *sizes[1:]]) for chunk in range(500)]
        chunks = [ChunkStorageMetadata(offset, sizes) for offset in offsets]
        tensors[name] = TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size([4000, *sizes[1:]]), chunks)
        for number, offset in enumerate(offsets):
            places[MetadataIndex(name, offset, number)] = _StorageInfo("__0_0.distcp", 8 * number, 8)
    data = pickle.dumps(Metadata(tensors, {name: (name,) for name in tensors}, places), protocol)
    with three_quarters_of_the_memory():
        assert len(members_of(read_pickle(io.BytesIO(data)).root)["storage_data"].pairs) == 1000


@contextmanager
def three_quarters_of_the_memory() -> Iterator[None]:
    """Within it, a pickle may have three quarters of the usual memory for its bytes, and little besides."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pickled_module, "FREE_BYTES", 8000)
        patch.setattr(pickled_module, "RECORD_BYTES_PER_BYTE", RECORD_BYTES_PER_BYTE * 3 // 4)
        yield


@pytest.mark.parametrize(
    "value, finding",
    [
        (tensor((2**40,), (1,)), "reaches beyond its storage of 12 elements"),
        (tensor((3, 4), (4, 1), start=1), "reaches beyond its storage of 12 elements"),
        (tensor((3, 4), (5, 1)), "reaches beyond its storage of 12 elements"),
        (tensor((3,), (1,), numel=13), "has 48 bytes for a tensor of shape 3, whose storage has 13 elements"),
        (tensor((2**40,), (0,)), "whose elements overlap"),
        (tensor((3, 4), (1, 1)), "whose elements overlap"),
        (tensor((-3, 4), (4, 1)), "without a shape"),
        (tensor((3, 4), (-4, 1)), "without a shape"),
        (tensor((3, 4), (4, 1), start=-1), "without a shape"),
        (tensor((2**70,), (1,)), "without a shape"),
        (tensor((3, 4), (4,)), "reaches beyond"),
        (Call(_rebuild_tensor_v2, "0", 0, (3,), (1,), False, None), "in a storage that this program does not read"),
        (Call(_rebuild_tensor_v2), "without a storage"),
        (Call(_rebuild_tensor_v2, Stored(12, "../0"), 0, (3,), (1,), False, None), "has 0 bytes for a tensor"),
    ],
)
def test_a_tensor_that_does_not_lie_in_its_storage_is_refused(tmp_path: Path, value: object, finding: str) -> None:
    file = opened(write(tmp_path / "file", value))
    with pytest.raises(UserError, match=finding) as caught:
        file.place_of(file.root)
    assert str(tmp_path / "file") in str(caught.value)


def test_two_tensors_may_share_a_storage(tmp_path: Path) -> None:
    data = torch.arange(12, dtype=torch.float32).numpy().tobytes()
    file = opened(write(tmp_path / "file", [tensor((3, 4), (4, 1)), tensor((4,), (1,), start=8)], data))
    whole, last = (file.read(place) for place in map(file.place_of, file.root) if place is not None)
    assert torch.equal(whole[2], last)


def test_a_compressed_member_is_refused_before_it_grows(tmp_path: Path) -> None:
    write(tmp_path / "bomb", tensor((3, 4), (4, 1)), bytes(10**8), zipfile.ZIP_DEFLATED)
    assert (tmp_path / "bomb").stat().st_size < 10**6
    with pytest.raises(UserError, match="has compressed or encrypted members"):
        opened(tmp_path / "bomb")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_members_of_the_same_name_and_inside_one_another_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "twice", 1)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("other/data.pkl", pickled(2))
    with pytest.raises(UserError, match="inside one another or of the same name"):
        opened(path)
    path = write(tmp_path / "inside", 1)
    data = bytearray(path.read_bytes())
    entry = data.rindex(b"PK\x01\x02")  # of the last member, which now begins where the first does
    data[entry + 42 : entry + 46] = bytes(4)
    path.write_bytes(data)
    with pytest.raises(UserError, match="inside one another or of the same name"):
        opened(path)


def test_a_file_with_the_highest_byte_first_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "file", "w") as archive:
        archive.writestr("archive/data.pkl", pickled(1))
        archive.writestr("archive/byteorder", "big")
    with pytest.raises(UserError, match="highest byte first"):
        opened(tmp_path / "file")


def test_a_pickle_larger_than_any_model_needs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(SAVED, tmp_path / "file")
    monkeypatch.setattr(torch_file_module, "MOST_PICKLE_BYTES", 100)
    with pytest.raises(UserError, match="has a pickle of [0-9]+ bytes, more than 100"):
        opened(tmp_path / "file")


def test_a_byte_order_of_terabytes_is_not_read(tmp_path: Path) -> None:
    class Endless(Window):
        """A file whose byte order is said to have 2^42 bytes."""

        def read_at(self, offset: int, nbytes: int) -> bytearray:
            assert nbytes < 2**42
            return super().read_at(offset, nbytes)

    torch.save(1, tmp_path / "file")
    members = zip_members(Window(tmp_path / "file"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_file_module, "zip_members", lambda _: {**members, "byteorder": Bytes(0, 2**42)})
        with pytest.raises(UserError, match="highest byte first"):
            TorchFile(Endless(tmp_path / "file"))


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_file_cut_off_anywhere_is_refused_by_name(tmp_path: Path, is_zip: bool) -> None:
    torch.save(SAVED, tmp_path / "file", _use_new_zipfile_serialization=is_zip)
    data = (tmp_path / "file").read_bytes()
    for length in range(0, len(data), 61):
        (tmp_path / "cut").write_bytes(data[:length])
        with pytest.raises(UserError, match=str(tmp_path / "cut")):
            read_all(tmp_path / "cut")


def read_all(path: Path) -> None:
    file = opened(path)
    for record in members_of(members_of(file.root).get("model")).values():
        place = file.place_of(record)
        if place is not None:
            file.read(place)


@given(st.booleans(), st.integers(0, 10**6), st.integers(1, 255))
def test_a_changed_byte_gives_other_values_or_one_kind_of_error(
    tmp_path_factory: pytest.TempPathFactory, is_zip: bool, place: int, change: int
) -> None:
    buffer = io.BytesIO()
    torch.save(SAVED, buffer, _use_new_zipfile_serialization=is_zip)
    data = bytearray(buffer.getvalue())
    data[place % len(data)] ^= change
    path = tmp_path_factory.getbasetemp() / "changed"
    path.write_bytes(data)
    message = message_of(ValueError, lambda: read_all(path))
    assert message is None or str(path) in message


def test_a_pipe_and_a_folder_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "missing"):
        with pytest.raises(UserError, match="cannot be read"):
            opened(path)
