"""A small SVG canvas: shapes and words in the colours of a theme. Numbers are rounded, so a picture is the same on every machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif"
MONOSPACE = "ui-monospace, SFMono-Regular, Menlo, 'DejaVu Sans Mono', Consolas, monospace"


@dataclass(frozen=True)
class Theme:
    """The colours of one look. The background is the page's own.

    slices: of the four slices of a small world. paper: behind shapes that cover others.
    """

    name: str
    ink: str
    faint: str
    line: str
    paper: str
    inter: str
    intra: str
    compute: str
    gradient: str
    accent: str
    slices: tuple[str, str, str, str]
    series: tuple[str, ...]


LIGHT = Theme(
    name="light",
    ink="#1f2328",
    faint="#636c76",
    line="#d1d9e0",
    paper="#f6f8fa",
    inter="#c2410c",
    intra="#0969da",
    compute="#8c959f",
    gradient="#8250df",
    accent="#1a7f37",
    slices=("#2f81f7", "#1f9d8b", "#d9820b", "#c2459a"),
    series=("#8c959f", "#57606a", "#0969da", "#1a7f37", "#bf8700", "#8250df", "#c2410c", "#c2459a"),
)
DARK = Theme(
    name="dark",
    ink="#e6edf3",
    faint="#9198a1",
    line="#3d444d",
    paper="#151b23",
    inter="#ff9152",
    intra="#58a6ff",
    compute="#767e88",
    gradient="#bc8cff",
    accent="#3fb950",
    slices=("#58a6ff", "#39c5b0", "#f0a832", "#f27bc4"),
    series=("#767e88", "#adb5be", "#58a6ff", "#3fb950", "#e3b341", "#bc8cff", "#ff9152", "#f27bc4"),
)
THEMES = (LIGHT, DARK)


@dataclass
class Canvas:
    """A picture of `width` x `height` units under construction. title: what it shows, for readers who cannot see it.

    style: rules of CSS, for pictures that move.
    """

    width: float
    height: float
    theme: Theme
    title: str
    style: str = ""
    _parts: list[str] = field(default_factory=list)

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = "none",
        stroke: str = "none",
        radius: float = 2,
        opacity: float = 1,
        dashes: str = "",
        css: str = "",
    ) -> None:
        attributes = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="{_n(radius)}"'
        self._parts.append(f"<rect {attributes} {_paint(fill, stroke, opacity, dashes)}{css}/>")

    def line(
        self, points: Sequence[tuple[float, float]], *, stroke: str, width: float = 1.2, dashes: str = "", arrow: bool = False
    ) -> None:
        """Straight lines through all points; `arrow` puts a head at the last one."""
        path = "M" + " L".join(f"{_n(x)} {_n(y)}" for x, y in points)
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self._parts.append(f'<path d="{path}" fill="none" stroke="{stroke}" stroke-width="{_n(width)}"{dashed}/>')
        if arrow:
            self._head(points[-2], points[-1], stroke, 3.2 * max(1.0, width))

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 13,
        fill: str = "",
        anchor: str = "start",
        bold: bool = False,
        mono: bool = False,
        css: str = "",
    ) -> None:
        """One line of words; y is their base line."""
        style = f' font-family="{MONOSPACE}"' if mono else ""
        weight = ' font-weight="600"' if bold else ""
        place = f'x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" fill="{fill or self.theme.ink}" text-anchor="{anchor}"'
        self._parts.append(f"<text {place}{weight}{style}{css}>{escape(words)}</text>")

    def lines(self, x: float, y: float, words: Iterable[str], *, size: float = 12, fill: str = "", anchor: str = "start") -> None:
        """Lines of words, one under the other."""
        for index, one in enumerate(words):
            self.text(x, y + 1.35 * size * index, one, size=size, fill=fill, anchor=anchor)

    def legend(self, x: float, y: float, colours: Mapping[str, str]) -> None:
        """What each colour stands for, in one row; y is the upper edge."""
        for words, colour in colours.items():
            self.rect(x, y, 11, 11, fill=colour, stroke=self.theme.line)
            self.text(x + 16, y + 10, words, size=12, fill=self.theme.faint)
            x += 36 + 6.6 * len(words)

    def svg(self) -> str:
        """The whole picture as text."""
        size = f'viewBox="0 0 {_n(self.width)} {_n(self.height)}" width="{_n(self.width)}" height="{_n(self.height)}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{FONT}">'
        style = [f"<style>{self.style}</style>"] if self.style else []
        return "\n".join([head, f"<title>{escape(self.title)}</title>", *style, *self._parts, "</svg>"]) + "\n"

    def _head(self, origin: tuple[float, float], tip: tuple[float, float], fill: str, size: float) -> None:
        across, down = tip[0] - origin[0], tip[1] - origin[1]
        length = (across**2 + down**2) ** 0.5
        across, down = across / length, down / length
        base = (tip[0] - 2 * size * across, tip[1] - 2 * size * down)
        corners = [tip, (base[0] - size * down, base[1] + size * across), (base[0] + size * down, base[1] - size * across)]
        self._parts.append(f'<path d="M{" L".join(f"{_n(x)} {_n(y)}" for x, y in corners)} Z" fill="{fill}"/>')


def _paint(fill: str, stroke: str, opacity: float, dashes: str) -> str:
    parts = [f'fill="{fill}"']
    parts += [f'stroke="{stroke}"'] * (stroke != "none")
    parts += [f'opacity="{_n(opacity)}"'] * (opacity != 1)
    parts += [f'stroke-dasharray="{dashes}"'] * bool(dashes)
    return " ".join(parts)


def _n(value: float) -> str:
    """A number with at most one digit behind the point."""
    return f"{value:.1f}".removesuffix(".0")
