"""Where a source has each element, by the words of its definition alone."""

from __future__ import annotations

from megatron_zpp.checkpoint.manifest import ELEMENT_BYTES
from megatron_zpp.checkpoint.source import RowSteps, Source


def places_of(source: Source) -> list[tuple[int, int]]:
    """The byte of every element in the file, and its place in the wanted stripe."""
    rows = source.rows or RowSteps(source.count, 0, source.count, source.count)
    places = []
    for element in range(rows.lead, rows.lead + source.count):
        row, column = divmod(element, rows.width)
        byte = source.offset + (row * rows.stored + column - rows.lead) * ELEMENT_BYTES[source.element_type]
        places.append((byte, source.first + row * rows.wanted + column - rows.lead))
    return places
