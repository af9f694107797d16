"""Turns <picture> with a dark and a light file into two images, of which the site shows the one of its theme."""

from __future__ import annotations

import re

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

PICTURE = re.compile(r'<picture>\s*<source [^>]*srcset="([^"]+)"[^>]*>\s*<img ([^>]*)>\s*</picture>')


class Pictures(SphinxTransform):
    """Runs before Sphinx collects images, which copies the files and reports missing ones."""

    default_priority = 100

    def apply(self) -> None:
        for raw in list(self.document.findall(nodes.raw)):
            found = PICTURE.fullmatch(raw.astext().strip())
            if found is not None:
                dark, attributes = found.groups()
                given = dict(re.findall(r'(\w+)="([^"]*)"', attributes))
                raw.replace_self([_image(given["src"], given["alt"], "only-light"), _image(dark, given["alt"], "only-dark")])


def _image(path: str, alt: str, shown: str) -> nodes.image:
    return nodes.image("", uri=path, alt=alt, classes=[shown])


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_transform(Pictures)
    return {"parallel_read_safe": True}
