"""Masked addresses: what is one goes, what only looks like one stays."""

from collections import Counter

import pytest

from data_prep.text.clean import MASK_KINDS, mask_addresses

CASES = [
    ("Write to jane.doe+x@mail.example-site.co.uk, or not.", "Write to email@example.com, or not."),
    ("(a@b.org)<c_d@e.museum>", "(email@example.com)<email@example.com>"),
    ("@user said a @ b.com and x@y", "@user said a @ b.com and x@y"),
    ("at 10.0.255.1. Then 8.8.8.8:53,", "at 192.0.2.1. Then 192.0.2.1:53,"),
    ("version 1.2.3.4.5, 256.1.1.1, 1.2.3 and v1.2.3.4", "version 1.2.3.4.5, 256.1.1.1, 1.2.3 and v1.2.3.4"),
    ("from fe80::1ff:fe23:4567:890a on", "from 2001:db8::1 on"),
    ("2001:0db8:85a3:0000:0000:8a2e:0370:7334", "2001:db8::1"),
    ("at 12:30:45, std::cout, a::b, :: and bad:cafe", "at 12:30:45, std::cout, a::b, :: and bad:cafe"),
    ("It rose[12] again[citation needed].[edit] a[i] [1234]", "It rose again. a[i] [1234]"),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_addresses_and_citation_marks(text, expected):
    counts = Counter()
    assert mask_addresses(text, MASK_KINDS, counts) == expected
    assert (counts.total() > 0) == (text != expected)
    assert mask_addresses(text, (), Counter()) == text


def test_a_long_text_of_near_misses_takes_no_time():
    text = "a." * 200_000 + "@" + "1." * 200_000 + "f:" * 100_000
    assert mask_addresses(text, MASK_KINDS, Counter()) == text
