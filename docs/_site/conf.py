"""How Sphinx builds the pages that `tools.site` has laid out around this file."""

from __future__ import annotations

import gc

import layerzero

gc.set_threshold(100_000, 50, 100)  # the pages are all kept until the end: looking for what to drop finds nothing

project = "LayerZero"
author = "The LayerZero authors"
version = release = layerzero.__version__
language = "en"

extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 5
exclude_patterns = ["files"]
highlight_language = "none"  # a block that names no language is a shell session or output
pygments_style = "github-light-high-contrast"
pygments_dark_style = "github-dark-high-contrast"
smartquotes = False  # options begin with two dashes
# what blocks show is often a shell session, a table or half of a file: no lexer's opinion on it is an error
suppress_warnings = ["misc.highlighting_failure"]

html_theme = "furo"
html_title = f"LayerZero {version}"
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_domain_indices = False
toc_object_entries = False
add_module_names = False
python_maximum_signature_line_length = 88
html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": {
        "color-brand-primary": "#0b5cad",
        "color-brand-content": "#0b5cad",
        "color-brand-visited": "#6a3fa0",
        "color-foreground-secondary": "#4b5563",
        "color-foreground-muted": "#5b6472",
        "color-sidebar-caption-text": "#4b5563",
    },
    "dark_css_variables": {
        "color-brand-primary": "#7cb8ff",
        "color-brand-content": "#7cb8ff",
        "color-brand-visited": "#c9a6ff",
        "color-foreground-secondary": "#b4bcc8",
        "color-foreground-muted": "#a5aebb",
        "color-sidebar-caption-text": "#b4bcc8",
    },
}
