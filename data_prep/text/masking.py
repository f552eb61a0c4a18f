"""Masking of text: e-mail addresses and IP addresses become reserved ones, citation marks go.

The address is one that RFC 2606 sets aside for examples, the IP address one of RFC 5737's and RFC 3849's for documentation:
nobody's, and words like any other to a tokenizer.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter

KINDS = ("emails", "ips", "citations")
EMAIL, IPV4, IPV6 = "email@example.com", "192.0.2.1", "2001:db8::1"
# The local part of RFC 5322 without quotes; a domain of labels of RFC 1035 with a top-level one of letters.
_EMAIL = re.compile(
    r"(?<![\w.!#$%&'*+/=?^`{|}~-])[\w.!#$%&'*+/=?^`{|}~-]{1,64}@"
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.){1,8}[A-Za-z]{2,24}(?![\w@-])"
)
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?!\w|\.\d)")
_IPV6 = re.compile(r"(?<![\w:.])(?=[0-9A-Fa-f]*:)[0-9A-Fa-f:]{2,39}(?![\w:])")
# Wikipedia's marks as extractors leave them (Raffel et al. 2020, section 2.2).
_CITATION = re.compile(r"\[(?:\d{1,3}|edit|citation needed)\]")


def _address(text: str, version: int) -> bool:
    try:
        return ipaddress.ip_address(text).version == version
    except ValueError:
        return False


def mask(text: str, kinds: tuple[str, ...], counts: Counter[str]) -> str:
    """`text` with what `kinds` names replaced, and counted in `counts`."""
    if "emails" in kinds and "@" in text:
        text, found = _EMAIL.subn(EMAIL, text)
        counts["masked e-mail addresses"] += found
    if "ips" in kinds:
        text = _masked(_IPV4, text, 4, IPV4, counts)
        if text.count(":") > 1:
            text = _masked(_IPV6, text, 6, IPV6, counts)
    if "citations" in kinds and "[" in text:
        text, found = _CITATION.subn("", text)
        counts["removed citation marks"] += found
    return text


def _masked(pattern: re.Pattern[str], text: str, version: int, instead: str, counts: Counter[str]) -> str:
    def replace(match: re.Match[str]) -> str:
        # "a::b" and "::" are punctuation of some languages
        groups = len([part for part in match[0].split(":") if part])
        if (version == 4 or groups > 2) and _address(match[0], version):
            counts["masked IP addresses"] += 1
            return instead
        return match[0]

    return pattern.sub(replace, text)
