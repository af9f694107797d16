"""Which texts gigatoken encodes to the same ids as the other packages. It knows a newer Unicode than they do."""

import re
import unicodedata
from collections.abc import Sequence

import numpy as np

CODE_POINTS = 0x110000
CHECKED_CHARACTERS = 1 << 16  # at a time, to bound memory
# Characters of Unicode 17. gigatoken 0.10 knows whether they are letters, digits, marks or symbols; tokenizers 0.23 and tiktoken 0.14 do
# not.
YOUNG = (
    "88f c5c cdc 1acf-1aeb 20c1 2b96 a7ce-a7d4 a7f1 fbc3-fbd2 fd90-fd91 fdc8-fdce 10940-10959 10ec5-10efb 11b60-11b67 11db0-11de9 "
    "16ea0-16ed3 16ff2-16ff6 187f8-187ff 18d09-18df2 1ccfa-1ccfc 1ceba-1cef0 1e6c0-1e6ff 1f6d8 1f777-1f77a 1f8d0-1f8d8 1fa54-1fa57 "
    "1fa8a-1fa8e 1fac8-1facd 1faea-1faef 1fbfa 2b73a-2b73f 2cea2-2cead 323b0-33479"
)


class KnownCharacters:
    """Accepts a text whose characters Python's Unicode has assigned, and that is not younger than the packages.

    normalizes: the tokenizer brings texts into form NFC. The packages agree on that only for texts that have this form.
    """

    def __init__(self, *, normalizes: bool) -> None:
        self._normalizes = normalizes
        categories = map(unicodedata.category, map(chr, range(CODE_POINTS)))
        self._is_known = np.fromiter(map("Cn".__ne__, categories), bool, CODE_POINTS)
        for part in YOUNG.split():
            first, _, last = part.partition("-")
            self._is_known[int(first, 16) : int(last or first, 16) + 1] = False

    def __call__(self, text: str) -> bool:
        if text.isascii():
            return True
        if self._normalizes and not unicodedata.is_normalized("NFC", text):
            return False
        parts = (text[start : start + CHECKED_CHARACTERS] for start in range(0, len(text), CHECKED_CHARACTERS))
        return all(self._is_known[np.frombuffer(part.encode("utf-32-le"), np.uint32)].all() for part in parts)


class WithoutSpellings:
    """Accepts a text that spells none of the pieces that SentencePiece never gives to a text. gigatoken takes them for pieces."""

    def __init__(self, spellings: Sequence[str]) -> None:
        self._spelled = re.compile("|".join(map(re.escape, spellings)))

    def __call__(self, text: str) -> bool:
        return self._spelled.search(text) is None
