"""GPT-2's byte-pair encoding, read from vocab.json and merges.txt."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_zpp.data.tokenizers.byte_pair_encoding import BytePairEncoding
from megatron_zpp.data.tokenizers.file_kinds import MERGES, VOCABULARY, naming_other_kind
from megatron_zpp.system.outside import VOCABULARY_BYTES, OutsideFile
from megatron_zpp.system.user_error import UserError

END_OF_TEXT = "<|endoftext|>"
IDS = 2**31  # ids are int32
# GPT-2's own pattern, with possessive quantifiers where backtracking could not help. The last two alternatives leave the last character of
# a run of white space to the word after it.
PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


def byte_letters() -> dict[int, str]:
    """The letter for each byte in GPT-2's files: printable bytes are themselves, the others are U+0100 and up, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + place) for place, byte in enumerate(others)}}


LETTERS = byte_letters()
BYTES = {letter: byte for byte, letter in LETTERS.items()}


class GPT2BPETokenizer(BytePairEncoding):
    """Encodes with the merges of merges.txt to the ids of vocab.json. <|endoftext|> ends a document; in a text it is plain text."""

    def __init__(self, vocab_path: str, merge_path: str) -> None:
        vocabulary = read_vocabulary(vocab_path)
        self.eod = vocabulary[END_OF_TEXT]
        with naming_other_kind(_merge_file(merge_path), MERGES):
            ranks = _ranks(read_merges(merge_path), merge_path)
            ids = np.array([_id_of(token, vocabulary, vocab_path, merge_path) for token in ranks], dtype=np.int32)
        reached = set(ids.tolist())
        added = {token_id: token for token, token_id in vocabulary.items() if token_id not in reached}
        super().__init__(PATTERN, ranks, ids, added, fast_scheme="gpt2", splits_runs=True)


def read_vocabulary(path: str) -> dict[str, int]:
    """The id of every token in GPT-2's letters. Raises UserError for another file, and for one without <|endoftext|>."""
    source = OutsideFile(Path(path), f"--vocab-file {path}", "give a vocab.json.", most_bytes=VOCABULARY_BYTES)
    source.check_is_there()
    with naming_other_kind(source, VOCABULARY):
        members = source.members()
        for token, token_id in members.values.items():
            if type(token_id) is not int or not 0 <= token_id < IDS:
                members.refuse(token, f"an id, a whole number from 0 to {IDS - 1}")
    vocabulary = dict(members.values)
    if len(set(vocabulary.values())) < len(vocabulary):
        raise UserError(f"--vocab-file {path} gives one id to two tokens; give the file that belongs to --merge-file.")
    if END_OF_TEXT not in vocabulary:
        raise UserError(f"--vocab-file {path} has no {END_OF_TEXT} to end documents with; add it to the file.")
    return vocabulary


def read_merges(path: str) -> list[tuple[str, str]]:
    """The pairs of tokens in GPT-2's letters that merge, in order. A first line with a version is not a merge."""
    file = _merge_file(path)
    file.check_is_there()
    merges = []
    for number, line in enumerate(file.text().split("\n"), 1):
        pair = line.split()
        if not pair or (number == 1 and line.startswith("#version")):
            continue
        if len(pair) != 2 or not BYTES.keys() >= set("".join(pair)):
            raise UserError(f"--merge-file {path}, line {number}: {line!r} is not two tokens in GPT-2's letters; give a merges.txt.")
        merges.append((pair[0], pair[1]))
    return merges


def _merge_file(path: str) -> OutsideFile:
    return OutsideFile(Path(path), f"--merge-file {path}", "give a merges.txt.", most_bytes=VOCABULARY_BYTES)


def _ranks(merges: Sequence[tuple[str, str]], path: str) -> dict[bytes, int]:
    """The rank of every token: first the 256 bytes, then the tokens in the order of their merges."""
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [bytes(BYTES[letter] for letter in left + right) for left, right in merges]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    if len(ranks) < len(tokens):
        # tiktoken knows tokens, not pairs, so it would use the rank of the first merge for both.
        raise UserError(
            f"--merge-file {path} makes one token by two merges, which is not supported; give a file in GPT-2's form, or a tokenizer.json."
        )
    return ranks


def _id_of(token: bytes, vocabulary: dict[str, int], vocab_path: str, merge_path: str) -> int:
    spelling = "".join(LETTERS[byte] for byte in token)
    if spelling not in vocabulary:
        raise UserError(
            f"--vocab-file {vocab_path} lacks {spelling!r}, which --merge-file {merge_path} makes; give files of one tokenizer."
        )
    return vocabulary[spelling]
