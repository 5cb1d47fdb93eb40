"""What every HTML page of the command line says to the browser before anything else."""

from __future__ import annotations

import base64
import hashlib

__all__ = ["content_policy"]


def content_policy(script: str = "") -> str:
    """The page's Content-Security-Policy as a meta element: nothing is loaded, sent or run but what the page came with.

    `script` is the text between the page's own script tags. It is allowed by its hash, so that an inline script or
    handler in a text from outside, were it ever left unescaped, would still not run.
    """
    rules = ["default-src 'none'", "style-src 'unsafe-inline'", "base-uri 'none'", "form-action 'none'"]
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
        rules.append(f"script-src 'sha256-{digest}'")
    return f'<meta http-equiv="Content-Security-Policy" content="{"; ".join(rules)}">'
