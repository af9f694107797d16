"""Where the members of a zip file of torch.save are. Nothing is extracted: members are read in place, as torch stores them."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping
from typing import NamedTuple

from megatron_zpp.checkpoint.megatron.window import Window
from megatron_zpp.system.user_error import UserError

SIGNATURE = b"PK\x03\x04"  # begins each member, and so the file
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, bytes of the name, bytes of the extra field
_ENCRYPTED = 1
_UNREADABLE = (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError, EOFError, OverflowError)


class Bytes(NamedTuple):
    """A range of bytes of a file."""

    start: int
    nbytes: int


def is_zip(window: Window) -> bool:
    return window.nbytes >= len(SIGNATURE) and window.read_at(0, len(SIGNATURE)) == SIGNATURE


def zip_members(window: Window) -> Mapping[str, Bytes]:
    """The bytes of each member by name, without the folder that torch puts before all names.

    Raises UserError, naming the file, if it is damaged, or if members are compressed, encrypted or inside one another.
    """
    try:
        with zipfile.ZipFile(window) as archive:
            members = sorted(archive.infolist(), key=lambda member: member.header_offset)
    except _UNREADABLE as error:
        raise UserError(f"{window.name} is damaged or incomplete ({error}); copy it again.") from None
    places: dict[str, Bytes] = {}
    end = 0
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size or member.flag_bits & _ENCRYPTED:
            raise UserError(f"{window.name} has compressed or encrypted members, which torch.save does not write; save it again.")
        signature, *lengths = _LOCAL_HEADER.unpack(window.read_at(member.header_offset, _LOCAL_HEADER.size))
        place = Bytes(member.header_offset + _LOCAL_HEADER.size + sum(lengths), member.file_size)
        name = member.filename.partition("/")[2]
        if signature != SIGNATURE or member.header_offset < end or name in places:
            raise UserError(f"{window.name} has members inside one another or of the same name, which torch.save does not write.")
        end = place.start + place.nbytes
        places[name] = place
    if end > window.nbytes:
        raise UserError(f"{window.name} ends inside of a member: it is incomplete; copy it again.")
    return places
