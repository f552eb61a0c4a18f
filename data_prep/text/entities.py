"""HTML's entities in text that was extracted from markup."""

from __future__ import annotations

import html
import re
from html.entities import html5

# a complete one; `&copy=2` and `&para` in code and addresses are text
ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[a-zA-Z][a-zA-Z0-9]{1,31});")
# most times that an entity was escaped; more would take quadratic time for a long `&amp;amp;amp;…`
MAX_ESCAPES = 16


def unescape(text: str) -> str:
    """`text` with the characters of its complete entities, also of escaped ones (`&amp;lt;`)."""
    for _ in range(MAX_ESCAPES):
        before, text = text, ENTITY.sub(_character, text)
        if text == before:
            break
    return text


def _character(entity: re.Match[str]) -> str:
    name = entity[0]
    return html.unescape(name) if name[1] == "#" or name[1:] in html5 else name
