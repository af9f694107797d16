"""Rates of links, in the notation of tc."""

from __future__ import annotations

from dataclasses import dataclass

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
UNLIMITED_WORDS = ("unlimited", "none", "0")


@dataclass(frozen=True, order=True)
class Rate:
    """The rate of a node's link in each direction; infinity means no limit."""

    bits_per_second: float

    @classmethod
    def parse(cls, text: str) -> Rate:
        """`200mbit`, `1.5gbit` or `unlimited`. Raises ValueError for anything else."""
        lowered = text.lower()
        if lowered in UNLIMITED_WORDS:
            return UNLIMITED
        number, unit = lowered[:-4], lowered[-4:]
        try:
            bits = float(number) * UNITS[unit]
        except (KeyError, ValueError):
            raise ValueError(f"--rate {text} is not a rate; write a number with kbit, mbit or gbit, or unlimited.") from None
        if not 0 < bits < float("inf"):
            raise ValueError(f"--rate {text} must be positive; write unlimited for no limit.")
        return cls(bits)

    @property
    def is_limited(self) -> bool:
        return self.bits_per_second != float("inf")

    @property
    def bytes_per_second(self) -> float:
        return self.bits_per_second / 8

    @property
    def in_words(self) -> str:
        return str(self).replace("mbit", " Mbit/s")

    def __str__(self) -> str:
        return f"{self.bits_per_second / 1e6:g}mbit" if self.is_limited else UNLIMITED_WORDS[0]


UNLIMITED = Rate(float("inf"))
