"""What every HTML page of the command line has in common: a page that needs nothing else, and text made safe for it."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from html import escape


def escaped(text: object) -> str:
    """A text from outside, as it may stand in a page."""
    return escape(str(text), quote=True)


def breakable(name: str) -> str:
    """A kernel id or a long name, escaped, that may break after its dots and underscores."""
    return escaped(name).replace(".", ".<wbr>").replace("_", "_<wbr>")


def page(title: str, style: str, parts: Iterable[str], script: str = "") -> str:
    """The whole page of some parts; empty ones are left out.

    Its Content-Security-Policy lets nothing be loaded, sent or run but what the page came with. A script is allowed by
    its hash, so that an inline script or handler in a text from outside, were it ever left unescaped, would still not
    run.
    """
    rules, own = ["default-src 'none'", "style-src 'unsafe-inline'", "base-uri 'none'", "form-action 'none'"], ""
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
        rules.append(f"script-src 'sha256-{digest}'")
        own = f"<script>{script}</script>\n"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{"; ".join(rules)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escaped(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + f"\n</main>\n{own}</body>\n</html>\n"
    )
