"""Checkpoints in parts, one on the disk of each node: finds one that is whole, and ends a save that a crash has interrupted.

Every part has the files of its node's ranks, and the manifest of all. Parts belong together if their manifests are the same. A checkpoint
is whole if each file of its manifest is in one of its parts, on whatever node: what is on a disk counts, and not which ranks are beside it.
"""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from megatron_zpp.checkpoint.disk import Disk, Ranks, raise_if_any_failed
from megatron_zpp.checkpoint.folders import (
    LATEST_FILE,
    RELEASE,
    Leftover,
    Stage,
    check_holds_own_checkpoints,
    final_folders,
    folder_named,
    in_place,
    iteration_folder,
    leftovers,
    put_in_place,
    read_latest,
)
from megatron_zpp.checkpoint.manifest import (
    CheckpointError,
    DamagedCheckpointError,
    Manifest,
    is_whole,
    manifest_bytes,
    manifest_of,
    marker_json,
    read_marker,
)
from megatron_zpp.checkpoint.other_disks import OtherDisks
from megatron_zpp.checkpoint.reader import CheckpointReader
from megatron_zpp.system.owner import own_token

NAMED_FILES = 3  # of those that are missing, in an error


@dataclass(frozen=True)
class Listing:
    """What the disk of a node has in a directory of checkpoints.

    latest: the final name of the folder that LATEST_FILE names; None without one. wrong_latest: why it names none.
    markers: see `_named_in`.
    fault: why the directory cannot be used; empty if it can.
    """

    host: str = ""
    latest: str | None = None
    wrong_latest: str = ""
    markers: Mapping[str, str] = field(default_factory=dict)
    fault: str = ""

    @classmethod
    def of(cls, directory: Path) -> Listing:
        host = socket.gethostname()
        try:
            check_holds_own_checkpoints(directory)
            markers = _named_in(directory)
        except (CheckpointError, OSError) as error:
            return cls(host, fault=str(error))
        try:
            text = read_latest(directory, "choose an iteration with --ckpt-step")
        except CheckpointError as error:
            return cls(host, wrong_latest=str(error), markers=markers)
        if text is None:
            return cls(host, markers=markers)
        folder = folder_named(directory, text)
        if folder is None:
            wrong = f"{directory / LATEST_FILE} holds {text[:40]!r} instead of an iteration; choose one with --ckpt-step"
            return cls(host, wrong_latest=wrong, markers=markers)
        return cls(host, folder.name, markers=markers)


@dataclass(frozen=True)
class Parts:
    """A checkpoint that is whole. folder: of the rank's own part, which may be missing. disks_of: by file the disks that have it.

    notices: about copies that are missing or damaged.
    """

    folder: Path
    manifest: Manifest
    disks_of: Mapping[str, Sequence[int]]
    notices: tuple[str, ...] = ()


@dataclass(frozen=True)
class _OwnPart:
    """What a rank reads of one checkpoint on its disk. folder: in which it is, or would be. identity: empty if there is nothing to use.

    content: of the manifest. files: those of the manifest that are there, if asked for. fault: why it cannot be used.
    """

    folder: Path
    manifest: Manifest | None = None
    content: bytes = b""
    identity: str = ""
    files: tuple[str, ...] = ()
    fault: str = ""

    @classmethod
    def of(cls, final: Path, named: AbstractSet[str], *, lists_files: bool) -> _OwnPart:
        """named: the markers that have this name on any disk. One of them that has it not yet here takes the place of an older one."""
        written = [left.folder for left in _written_in(final.parent) if left.final == final and _marker_of(left.folder) in named]
        folder = written[0] if written else in_place(final)
        if folder is None:
            return cls(final)
        try:
            content = manifest_bytes(folder)
            manifest = manifest_of(folder, content)
        except CheckpointError as error:
            return cls(folder, fault=error.finding if isinstance(error, DamagedCheckpointError) else str(error))
        files = tuple(file.name for file in manifest.files if _has(folder, file.name, file.nbytes)) if lists_files else ()
        return cls(folder, manifest, content, marker_json(content.decode()), files)


class NotWholeError(CheckpointError):
    """The parts of a checkpoint are not all there. The text names nodes and files."""


class PartsFinder:
    """Finds checkpoints in `directory` of all disks. Every rank must make the same calls; errors are alike on all of them."""

    def __init__(self, directory: Path, disk: Disk, ranks: Ranks) -> None:
        self.directory = directory
        self._disk = disk
        self._ranks = ranks
        own = json.dumps(asdict(Listing.of(directory))) if disk.is_first else ""
        self.listings = [Listing(**json.loads(text)) for text in filter(None, ranks.gather(own))]
        for index, listing in enumerate(self.listings):
            if listing.fault:
                raise CheckpointError(f"{listing.fault} (on {self._node(index)})")

    @property
    def names(self) -> list[str]:
        """The final names of all folders on any disk, newest first, complete or not."""
        return sorted({name for listing in self.listings for name in listing.markers if name != RELEASE}, key=_iteration, reverse=True)

    def candidates(self, step: int | None, *, may_be_older: bool) -> tuple[list[str], str]:
        """The names of the folders to load, in order, and a notice about the first; no names without a checkpoint.

        step: the iteration of the first one; None for the latest, which is the highest that a disk names: no disk names one before all
        have it. may_be_older: whether older ones follow. Raises CheckpointError for a missing iteration, and if a disk names none.
        """
        names = self.names
        if step is not None:
            first = iteration_folder(self.directory, step).name
            if first not in names:
                raise CheckpointError(f"--ckpt-step {step}: no node has a checkpoint of this iteration in {self.directory}; {self._held()}")
        else:
            for index, listing in enumerate(self.listings):
                if listing.wrong_latest:
                    return self._without_latest(f"{listing.wrong_latest} (on {self._node(index)})", may_be_older=may_be_older)
            named = [listing.latest for listing in self.listings if listing.latest is not None]
            if not named:
                why = f"{self.directory} has no {LATEST_FILE} on any node; the newest good checkpoint there is loaded"
                return (names, f"WARNING: {why}" if names else "") if may_be_older else ([], "")
            first = max(named, key=_iteration)
        return [first, *(self._older_than(first) if may_be_older else [])], ""

    def _without_latest(self, why: str, *, may_be_older: bool) -> tuple[list[str], str]:
        if not (may_be_older and self.names):
            raise CheckpointError(f"{why}; {self._held()}")
        return self.names, f"WARNING: passed over, because {why}"

    def find(self, name: str) -> Parts:
        """The checkpoint of that name. Raises NotWholeError if there is none that is whole."""
        named = {listing.markers.get(name, "") for listing in self.listings}
        own = _OwnPart.of(self.directory / name, named, lists_files=self._disk.is_first)
        answers = [json.loads(text) for text in self._ranks.gather(json.dumps([own.identity, own.fault, own.files]))]
        disks = [[answers[rank] for rank in self._disk.ranks_of(index)] for index in range(self._disk.count)]
        faults = [next((fault for _, fault, _ in of_disk if fault), "") for of_disk in disks]
        identities = ["" if fault else of_disk[0][0] for of_disk, fault in zip(disks, faults, strict=True)]
        present = [set(of_disk[0][2]) for of_disk in disks]
        about_faults = [f"{fault} (on {self._node(index)})" for index, fault in enumerate(faults) if fault]
        problems: list[str] = []
        for identity in dict.fromkeys(filter(None, identities)):
            holders = [index for index, other in enumerate(identities) if other == identity]
            manifest = own.manifest if own.identity == identity else None
            if any(other != identity for other, _, _ in answers):
                manifest = self._received(own, identity, self._disk.ranks_of(holders[0])[0])
            if manifest is None:
                raise RuntimeError(f"no manifest of {name} has come to rank {self._disk.rank}")
            disks_of = {file.name: [index for index in holders if file.name in present[index]] for file in manifest.files}
            missing = [file for file, found in disks_of.items() if not found]
            if not missing:
                notices = (*about_faults, *self._about_copies(self.directory / name, manifest, disks_of))
                return Parts(own.folder if own.identity == identity else self.directory / name, manifest, disks_of, notices)
            problems.append(self._about_missing(manifest, missing, holders, identities))
        raise NotWholeError(f"{self.directory / name} is not whole: {'; '.join(problems + about_faults) or 'no node has a part of it'}")

    def _about_copies(self, folder: Path, manifest: Manifest, disks_of: Mapping[str, Sequence[int]]) -> list[str]:
        """What to say if fewer disks have a file than have been asked for; nothing without copies."""
        copies = min(manifest.topology.get("copies", 1), self._disk.count)
        few = [file for file, disks in disks_of.items() if len(disks) < copies]
        if not few:
            return []
        return [f"{_some_of(few)} of {folder} {'is' if len(few) == 1 else 'are'} on fewer than {copies} disks until the next save"]

    def _received(self, own: _OwnPart, identity: str, source: int) -> Manifest:
        """The manifest of that identity, which rank `source` sends to all."""
        nbytes = json.loads(identity)["manifest_bytes"]
        is_source = self._disk.rank == source
        content = torch.frombuffer(bytearray(own.content), dtype=torch.uint8) if is_source else torch.empty(nbytes, dtype=torch.uint8)
        self._ranks.broadcast(content, source)
        data = content.numpy().tobytes()
        if marker_json(data.decode()) != identity:
            raise RuntimeError(f"rank {source} has sent another manifest of {own.folder} than it has read")
        return manifest_of(own.folder, data)

    def remedy(self, name: str) -> str:
        """What to do about the checkpoint of that name, which is not whole."""
        restore = "bring its missing part back to any node"
        for older in self._older_than(name):
            with suppress(NotWholeError):
                self.find(older)
                return f"{restore}, or load iteration {_iteration(older)}, which is whole, with --ckpt-step or --load-last-good-checkpoint"
        return f"{restore}; no older checkpoint is whole"

    def _older_than(self, name: str) -> list[str]:
        return [other for other in self.names if _iteration(other) < _iteration(name)]

    def verified(self, parts: Parts) -> tuple[Parts, list[str]]:
        """Reads all files of a checkpoint on all disks. Returns it without those that are damaged on a disk, of which its notices tell.

        Also what is wrong with files that are good as a whole nowhere.
        """
        own = [file for file in parts.manifest.files if self._disk.index in parts.disks_of[file.name]]
        with CheckpointReader(parts.folder, parts.manifest) as reader:
            found = {file.name: reader.damage(file) for file in own[self._disk.rank - self._disk.ranks[0] :: len(self._disk.ranks)]}
            of_pieces = list(reader.verify([]))
        answers = self._ranks.gather(json.dumps({name: finding for name, finding in found.items() if finding}))
        damaged = {(self._disk.index_of(rank), *pair) for rank, text in enumerate(answers) for pair in json.loads(text).items()}
        unusable = {(disk, name) for disk, name, _ in damaged}
        disks_of = {name: [disk for disk in disks if (disk, name) not in unusable] for name, disks in parts.disks_of.items()}
        lost, spared = list[str](), list[str]()
        for disk, name, finding in sorted(damaged):
            (spared if disks_of[name] else lost).append(f"{finding} (on {self._node(disk)})")
        notices = (*parts.notices, *(f"{finding}; a copy on another disk is read" for finding in spared))
        return replace(parts, disks_of=disks_of, notices=notices), of_pieces + lost

    def open(self, parts: Parts, announce: Callable[[str], None]) -> CheckpointReader:
        """A reader of the checkpoint. announce: receives a line about bytes that come from other disks."""
        others = OtherDisks(parts.folder, self._disk, self._ranks, parts.disks_of, announce)
        return CheckpointReader(parts.folder, parts.manifest, others)

    def _about_missing(self, manifest: Manifest, missing: Sequence[str], holders: Sequence[int], identities: Sequence[str]) -> str:
        without = [self._node(index) for index, identity in enumerate(identities) if not identity]
        of_another = [self._node(index) for index, identity in enumerate(identities) if identity and index not in holders]
        words = [f"no node has {_some_of(missing)} ({', '.join(manifest.states)} in {len(missing)} of {len(manifest.files)} files)"]
        words[0] += f", which {', '.join(map(self._node, holders))} {'names' if len(holders) == 1 else 'name'}"
        words += [f"{', '.join(without)} {'has' if len(without) == 1 else 'have'} no part of it"] if without else []
        words += [f"{', '.join(of_another)} {'has' if len(of_another) == 1 else 'have'} that of another save"] if of_another else []
        return ", ".join(words)

    def _node(self, index: int) -> str:
        return f"node {index} ({self.listings[index].host})"

    def _held(self) -> str:
        held = (
            f"{self._node(index)} has {', '.join(map(_word, sorted(listing.markers, key=_iteration))) or 'none'}"
            for index, listing in enumerate(self.listings)
        )
        return ", ".join(held)


def finish_interrupted_save(directory: Path, disk: Disk, check_lock: Callable[[], None] = lambda: None) -> list[str]:
    """Gives a checkpoint its name on this disk if a save has ended after another disk had named it. Returns the names.

    Whatever has its name on one disk was on all disks before, as a folder of stage UNFINISHED at least. Such a folder of this process that
    no disk has named is deleted, because no save is under way. The first rank of every disk must call it, and must hold the lock of its
    directory. Raises CheckpointError on all of them, and changes nothing, if one cannot look at its directory or has lost its lock.
    """
    error, named = "", dict[str, str]()
    written: list[tuple[Leftover, str]] = []
    try:
        check_lock()
        named = _named_in(directory)
        written = [(left, read_marker(left.folder)) for left in _written_in(directory)]
    except Exception as found:  # whatever it is, other disks must not wait for this one
        error = str(found)
    answers = [json.loads(text) for text in disk.firsts.gather(json.dumps([error, list(named.items())]))]
    raise_if_any_failed([error for error, _ in answers])
    named_somewhere = {tuple(pair) for _, pairs in answers for pair in pairs}
    finished = []
    for left, marker in written:
        if (left.final.name, marker) in named_somewhere and named.get(left.final.name) != marker:
            try:
                put_in_place(left.folder, left.final, left.token)
            except OSError as failure:
                raise CheckpointError(f"{left.folder} cannot be renamed to {left.final.name} ({failure.strerror})") from failure
            finished.append(left.final.name)
        elif left.token == own_token():
            shutil.rmtree(left.folder, ignore_errors=True)
    return finished


def _named_in(directory: Path) -> dict[str, str]:
    """The markers of all checkpoints in a directory, which may be missing, by their final names; empty if one cannot be read."""
    return {final.name: _marker_in(final) for final in final_folders(directory)}


def _written_in(directory: Path) -> list[Leftover]:
    """The folders in a directory of which all is written, and which have no name yet."""
    found = leftovers(directory) if directory.is_dir() else []
    return [left for left in found if left.stage is Stage.UNFINISHED and is_whole(left.folder)]


def _marker_in(final: Path) -> str:
    """The marker of a final folder, or of that which stands for it; empty if it cannot be read."""
    folder = in_place(final)
    return "" if folder is None else _marker_of(folder)


def _marker_of(folder: Path) -> str:
    try:
        return read_marker(folder)
    except CheckpointError:
        return ""


def _some_of(files: Sequence[str]) -> str:
    """The names of some files, and how many more there are."""
    return ", ".join(files[:NAMED_FILES]) + (f" and {len(files) - NAMED_FILES} more files" if len(files) > NAMED_FILES else "")


def _has(folder: Path, name: str, nbytes: int) -> bool:
    try:
        return (folder / name).stat().st_size == nbytes
    except OSError:
        return False


def _word(name: str) -> str:
    """What --ckpt-step calls a folder; the word `release` of one."""
    return name if name == RELEASE else str(_iteration(name))


def _iteration(name: str) -> int:
    """The iteration of a folder; -1 of a release, which is older than all."""
    return -1 if name == RELEASE else int(name.removeprefix("iter_"))
