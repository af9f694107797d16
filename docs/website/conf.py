"""Sphinx's settings for the site that `bash scripts/docs.sh` builds. The source folder is the root of the repository."""

from __future__ import annotations

from docs.website.navigation import ROOT, linked_sources

project = "megatron_zpp"
html_title = project
html_theme = "furo"
extensions = ["myst_parser", "docs.website.navigation", "docs.website.pictures", "docs.website.source_files"]

root_doc = "docs/index"
include_patterns = ["*.md", "benchmarks/**.md", "docs/**.md", *linked_sources()]
exclude_patterns = [".*", "build", "dist", "runs", "site", "tests"]

myst_heading_anchors = 4  # the anchors of GitHub, for headings up to this level
suppress_warnings = ["myst.header"]  # results that programs have printed begin with headings of level 3
highlight_language = "text"  # of blocks that name none
html_extra_path = [str(ROOT / "docs/website/root")]
html_static_path = [str(ROOT / "docs/website/static")]
html_css_files = ["style.css"]
smartquotes = False  # a flag begins with two hyphens
html_copy_source = False
html_use_index = False
html_show_copyright = False
html_show_sphinx = False
