"""The bytes of one payload: a slice of 512 values in two blocks and 6 exact values, in the codes that can carry it."""

from __future__ import annotations

from dataclasses import dataclass

from docs.drawing.canvas import Canvas, Theme
from megatron_zpp.comm.code import EXACT, Code, SliceShape
from megatron_zpp.ops.payload import padded_bytes

SHAPE = SliceShape(blocks=512, exact=6)
BLOCK_NUMEL, ELEMENT_BYTES = 256, 2
CODES = {
    "16 bits": ("as they are: ZeRO 0 to 3", EXACT),
    "8 bits": ("weights with qwZ", Code(8)),
    "4 bits": ("gradients with qgZ", Code(4)),
    "3 bits": ("Gaussian codes: lean", Code.gaussian(3, 1)),
    "1 bit": ("Gaussian codes at their smallest", Code.gaussian(1, 1)),
}
LEFT, TOP, ROW, HIGH, PIXELS_PER_BYTE = 212, 56, 46, 26, 0.56


@dataclass(frozen=True)
class Parts:
    """Bytes of one payload."""

    codes: int
    scales: int
    exact: int

    @property
    def total(self) -> int:
        return self.codes + self.scales + self.exact

    @classmethod
    def of(cls, code: Code) -> Parts:
        codes = padded_bytes(SHAPE.blocks * (code.bits or 8 * ELEMENT_BYTES) // 8)
        blocks = code.blocks_bytes(SHAPE.blocks, element_bytes=ELEMENT_BYTES, block_numel=BLOCK_NUMEL)
        whole = code.payload_bytes(SHAPE, element_bytes=ELEMENT_BYTES, block_numel=BLOCK_NUMEL)
        return cls(codes, blocks - codes, whole - blocks)


def draw(theme: Theme) -> Canvas:
    parts = [Parts.of(code) for _, code in CODES.values()]
    canvas = Canvas(LEFT + parts[0].total * PIXELS_PER_BYTE + 128, TOP + len(CODES) * ROW + 30, theme, "Bytes of one payload by its code")
    canvas.text(14, 24, "One payload: a slice of 512 values of matrices, and 6 of biases and norms", size=15, bold=True)
    for index, (name, (words, _)) in enumerate(CODES.items()):
        _row(canvas, TOP + index * ROW, name, words, parts[index], parts[0])
    kinds = ("values or their codes", "a scale per block of 256", "exact values, padded to 16 bytes")
    canvas.legend(LEFT, TOP + len(CODES) * ROW + 10, dict(zip(kinds, _colours(theme), strict=True)))
    return canvas


def _row(canvas: Canvas, y: float, name: str, words: str, parts: Parts, largest: Parts) -> None:
    theme, x = canvas.theme, float(LEFT)
    canvas.text(14, y + 12, name, size=14, bold=True)
    canvas.text(14, y + 27, words, size=11, fill=theme.faint)
    for nbytes, colour in zip((parts.codes, parts.scales, parts.exact), _colours(theme), strict=True):
        if nbytes:
            canvas.rect(x, y, nbytes * PIXELS_PER_BYTE - 1, HIGH, fill=colour)
            x += nbytes * PIXELS_PER_BYTE
    share = "" if parts == largest else f"  ({parts.total / largest.total:.2f})"
    canvas.text(x + 8, y + 17, f"{parts.total} bytes{share}", size=13)


def _colours(theme: Theme) -> tuple[str, str, str]:
    return theme.intra, theme.inter, theme.compute
