"""Tells whether a compiled library may be loaded. Loading runs it as code of this process, and a damaged one can kill the process.

Beside `library.so` lies `library.so.sha256`, the digest of its bytes in hexadecimal digits.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from megatron_zpp.system.output_file import new_file, sync_folder
from megatron_zpp.system.outside import OutsideFile, open_regular

ROOT = 0
DIGEST_BYTES = 1 << 10  # limit of the file of the digest
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
CHUNK_BYTES = 1 << 20


def why_not_loadable(library: Path) -> str | None:
    """Why the library must not be loaded, as words that continue its path; None if it may be.

    It and its folder must not be links; they belong to the user or root, and nobody else may write to them. Its bytes have their digest.
    """
    finding = why_not_ours(library.parent)
    if finding is not None:
        return f"lies in a folder that {finding}"
    return why_not_ours(library) or _why_damaged(library)


def why_not_ours(path: Path) -> str | None:
    """Why this file or folder may have been put here or changed by somebody else; None if only the user or root can have done it."""
    try:
        status = path.lstat()
    except OSError as error:
        return f"cannot be looked up ({error.strerror})"
    if stat.S_ISLNK(status.st_mode):
        return "is a symbolic link"
    if status.st_uid not in (os.geteuid(), ROOT):
        return f"belongs to the user with the id {status.st_uid}"
    if status.st_mode & WRITABLE_BY_OTHERS:
        return "can be changed by other users"
    return None


def digest_path(library: Path) -> Path:
    """The file with the digest of the library."""
    return library.with_name(f"{library.name}.sha256")


def put_in_place(made: Path, library: Path) -> None:
    """Gives a compiled library its final name, and writes its digest. Afterwards both are on the disk, whatever happens to the machine."""
    made.chmod(0o755)
    digest = made.with_name(digest_path(library).name)
    with new_file(digest) as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(f"{_digest(made)}\n".encode())
        file.flush()
        os.fsync(file.fileno())
    descriptor = open_regular(made)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    # The digest first: between the two renames an old library has the digest of the new one, and counts as damaged.
    os.replace(digest, digest_path(library))
    os.replace(made, library)
    sync_folder(library.parent)


def _why_damaged(library: Path) -> str | None:
    try:
        wanted = OutsideFile(digest_path(library), digest_path(library).name, most_bytes=DIGEST_BYTES).text().strip()
        found = _digest(library)
    except (OSError, ValueError) as error:
        return f"cannot be verified ({error})"
    return None if found == wanted else f"does not have the digest in {digest_path(library).name}"


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(open_regular(path), "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
