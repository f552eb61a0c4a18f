"""HTML entities of text with markup."""

from __future__ import annotations

import html
import re
from html.entities import html5

from megabert.data.text import MAX_ESCAPES

COMPLETE = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[a-zA-Z][a-zA-Z0-9]{1,31});")


def unescape(text: str) -> str:
    """`text` with complete entities resolved (`&name;` of HTML 5, `&#…;`), also escaped ones (`&amp;lt;`)."""
    for _ in range(MAX_ESCAPES):
        if "&" not in text:
            break
        before, text = text, COMPLETE.sub(_character, text)
        if text == before:
            break
    return text


def _character(match: re.Match[str]) -> str:
    entity = match[0]
    return html.unescape(entity) if entity[1] == "#" or entity[1:] in html5 else entity
