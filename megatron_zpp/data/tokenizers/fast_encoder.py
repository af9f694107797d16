"""Encodes texts with package gigatoken, which is faster than the packages that define the ids (docs/data.md).

It is used only where its ids are proven to be theirs: with the versions in `PROVEN_VERSIONS`, for tokenizers with the properties that
`tokenizer_json.py`, `byte_pair_encoding.py` and `sentencepiece_model.py` name, and for the texts that `served_text.py` accepts.
tests/data/tokenizers/test_fast_encoder.py is the proof.
"""

import importlib.metadata
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# Those of constraints.txt, which the proof has run with.
PROVEN_VERSIONS = {"gigatoken": "0.10.0", "sentencepiece": "0.2.3", "tiktoken": "0.14.0", "tokenizers": "0.23.3"}
IDS = 1 << 21  # it reserves memory for the largest id, and packs two ids into 42 bits
# It remembers every word and never forgets: 0.4 bytes for a byte of sources, 8 for a byte of random digits.
CACHE_BYTES = 1 << 28
MEMORY_FILE = Path("/proc/self/statm")
# Where packages are likely to differ: contractions, white space, digits, letters of all cases, marks, pictures, noncharacters, long words.
# Characters that not every tokenizer accepts are apart from the others, so that these are always compared.
HARD_TEXTS = (
    "I'll can't WE'RE it's'S '\u017f 'İ don''t\n'tis\r\n'LL",
    " a  b   c\td \t e\n\nf\r\ng \n h\u00a0i\u2003j\u3000 k\u0085l\u2028m\x0b\x0c\x1c\x1f\0 ",
    "1 12 123 1234 12345678 ٣٤٥ ⅷ² 3.14e-10 0xFF a1b2 1a,000",
    "camelCase HTTPServer ǅ ʰ İstanbul straße ﬁ 漢字かなカナ 한국어 हिन्दी ภาษา עברית العربية",
    "\u0301\u0301 a\u20dd 👩\u200d👩\u200d👧 🇩🇪 \ufeff\u200b\ufffd\ue000",
    "e\u0301 n\u0303\u0323 x'\u212a",
    "\uffff\U0010ffff",
    "==== //// /*!?*/ {[(<\"'`~^|\\>)]} ... --- ___ $$ %% @@ ##  \r\r\n/\n",
    "a" * 3000 + " " * 3000 + "ab" * 3000 + "!" * 300 + "\n" * 300 + "7" * 300,
    "   ",
    "\n",
)


class NotServed(Exception):
    """gigatoken cannot encode for a tokenizer; the message says why."""


class FastEncoder:
    """Encodes to the ids of `id_of` (by default those of the package itself).

    load: makes the package's tokenizer from `content`. accepts: whether the ids of a text are proven.
    before, after: ids around every text.
    Raises NotServed if the package refuses the content.
    """

    def __init__(
        self,
        load: Callable[[bytes], Any],
        content: bytes,
        accepts: Callable[[str], bool],
        *,
        id_of: np.ndarray | None = None,
        before: Sequence[int] = (),
        after: Sequence[int] = (),
    ) -> None:
        self._load, self._content = load, content
        self._accepts, self._id_of = accepts, id_of
        self._before, self._after = np.array(before, np.int32), np.array(after, np.int32)
        self._start()

    def encode(self, text: str) -> np.ndarray | None:
        """The ids, or None for a text that it does not accept."""
        if not self._accepts(text):
            return None
        ids = self._encoder.encode(text).view(np.int32) if self._id_of is None else self._id_of[self._encoder.encode(text)]
        return np.concatenate([self._before, ids, self._after]) if len(self._before) + len(self._after) else ids

    def bound_memory(self) -> None:
        """Starts anew, without what was remembered, if that has become too much."""
        if _resident_bytes() > self._most_bytes:
            self._start()

    def check(self, texts: Sequence[str], ids_of: Callable[[str], Sequence[int]]) -> None:
        """Raises NotServed if the ids of a text are not those of `ids_of`."""
        for text in texts:
            ids = self.encode(text)
            if ids is not None and ids.tolist() != list(ids_of(text)):
                raise NotServed(f"its ids differ, for example for {text[:40]!r}")

    def __reduce__(self) -> tuple[Callable[..., "FastEncoder"], tuple[object, ...]]:
        return _restored, (self._load, self._content, self._accepts, self._id_of, self._before, self._after)

    def _start(self) -> None:
        self._encoder: Any = None  # the old one is freed first
        try:
            self._encoder = self._load(self._content)
        except BaseException as error:  # the package panics with a BaseException of its own
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise NotServed(f"it refuses the tokenizer ({error})") from None
        self._most_bytes = _resident_bytes() + CACHE_BYTES


def from_tokenizer_json(content: bytes) -> Any:
    import gigatoken

    return gigatoken.Tokenizer.from_json(content)


def from_sentencepiece(content: bytes) -> Any:
    import gigatoken

    return gigatoken.Tokenizer.from_sentencepiece(content)


class FromRanks:
    """Loads lines of base64 and rank, as in a .tiktoken file. scheme: the package's name of the pattern that cuts texts."""

    def __init__(self, scheme: str) -> None:
        self._scheme = scheme

    def __call__(self, content: bytes) -> Any:
        import gigatoken

        with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file:
            file.write(content)
            file.flush()
            return gigatoken.Tokenizer.from_tiktoken(file.name, pretokenizer=self._scheme)


def _restored(
    load: Callable[[bytes], Any], content: bytes, accepts: Callable[[str], bool], id_of: np.ndarray | None, before: Any, after: Any
) -> FastEncoder:
    return FastEncoder(load, content, accepts, id_of=id_of, before=before, after=after)


def check_packages(reference: str) -> None:
    """Raises NotServed unless gigatoken and the package that defines the ids have the proven versions, and gigatoken's memory is known."""
    for package in ("gigatoken", reference):
        proven = PROVEN_VERSIONS[package]
        remedy = f"run: pip install {package}=={proven}"
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise NotServed(f"package {package} is not installed; {remedy}") from None
        if version != proven:
            raise NotServed(f"version {version} of {package} is installed, and the ids are proven for {proven}; {remedy}")
    if not MEMORY_FILE.exists():
        raise NotServed("its memory can be bounded only on Linux")


def _resident_bytes() -> int:
    return int(MEMORY_FILE.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
