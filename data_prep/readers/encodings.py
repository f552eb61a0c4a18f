"""Encodings: detection by content or by name, and a stream recoded to UTF-8, which all that follows takes.

A byte-order mark decides; else UTF-8, if the opening of a file has at least as many valid multi-byte characters
as invalid bytes; else charset-normalizer, where it is confident. Chunks may end inside a character.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator

from data_prep.common.errors import BadInput, Problems
from data_prep.common.records import AUTO

# the name of UTF-8, for which nothing is recoded
UTF8 = ""
MARKS = ((b"\xff\xfe\0\0", "utf-32"), (b"\0\0\xfe\xff", "utf-32"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))
# as browsers read Latin-1
WESTERN = "cp1252"
# The encodings of the web (WHATWG Encoding Standard, section 4.2), in Python's names: older tables only add wrong guesses.
COMMON = [
    *(f"cp{n}" for n in (1250, 1251, 1252, 1253, 1254, 1255, 1256, 1257, 1258, 866, 874)),
    *(f"iso8859_{n}" for n in (2, 5, 7, 9, 15)),
    *("koi8_r", "koi8_u", "gb18030", "big5", "euc_jp", "cp932", "cp949"),
]
# charset-normalizer takes either for Korean at times; hiragana identifies them
JAPANESE = ("cp932", "euc_jp")
HIRAGANA, HIRAGANA_SHARE = re.compile("[\u3041-\u3096]"), 0.2
# percent of unlikely characters, by charset-normalizer's measure
MAX_CHAOS = 10.0
MARK = "data_prep.mark"


def _mark(error: UnicodeError) -> tuple[str | bytes, int]:
    """Put the byte 0xFF, which no UTF-8 has, in place of what can't be recoded: its document is then dropped as bad."""
    if isinstance(error, UnicodeDecodeError):
        return "\udcff", error.end
    assert isinstance(error, UnicodeEncodeError)
    return b"\xff", error.end


codecs.register_error(MARK, _mark)


def check(name: str) -> str:
    """`auto`, UTF8 or a codec's name for --encoding. Raises BadInput for an unknown one."""
    if name == AUTO:
        return AUTO
    try:
        info = codecs.lookup(name)
        codecs.getincrementaldecoder(name)("strict").decode(b"")
        known = isinstance("a".encode(name), bytes)
    except (LookupError, ValueError, TypeError):
        known = False
    if not known:
        raise BadInput(f"--encoding {name}: no such text encoding (utf-8, cp1252, cp1251, shift_jis, gb18030, …)")
    return UTF8 if info.name in ("utf-8", "utf-8-sig") else info.name


def _is_utf8(head: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # a character cut at the end is no error
    except UnicodeDecodeError:
        return False
    return True


def decide(path: str, head: bytes) -> str:
    """Encoding of a file by its first bytes (64 KiB or more): UTF8 or a codec's name.

    Raises BadInput naming the file where it can't be decided.
    """
    for mark, name in MARKS:
        if head.startswith(mark):
            return name
    if _is_utf8(head):
        return UTF8
    if head.count(0) > len(head) // 4:
        return UTF8  # binary, which format detection reports
    text = head.decode(errors="replace")
    invalid = text.count("\ufffd")
    if sum(character > "\x7f" for character in text) - invalid >= invalid:
        return UTF8  # with bad places, reported where they are
    for name in JAPANESE:
        decoded = head.decode(name, "replace")
        wide = sum(character > "\x7f" for character in decoded)
        if "\ufffd" not in decoded[:-1] and len(HIRAGANA.findall(decoded)) > HIRAGANA_SHARE * wide:
            return name
    from charset_normalizer import from_bytes

    best = from_bytes(head[: 1 << 18], cp_isolation=COMMON).best()
    if best is not None and best.percent_chaos <= MAX_CHAOS:
        # The few bytes above 127 of English text fit many tables; take the most used one.
        if best.language == "English" or WESTERN in best.could_be_from_charset:
            return WESTERN
        if best.percent_coherence > 0:
            return best.encoding
    raise BadInput(f"{path}: not UTF-8, and its encoding can't be detected; name it with --encoding NAME")


def recode(chunks: Iterator[bytes], encoding: str, path: str, problems: Problems) -> Iterator[bytes]:
    """UTF-8 for chunks in `encoding`, without a byte-order mark.

    Under `stop` raises BadInput at the first byte that has no meaning; under `skip` the byte 0xFF stands for it,
    so that the document it is in is dropped and counted where UTF-8 is checked.
    """
    stop = problems.policy == "stop"
    decoder = codecs.getincrementaldecoder(encoding)("strict" if stop else MARK)
    fed, first = 0, True
    for chunk, last in _with_end(chunks):
        try:
            text = decoder.decode(chunk, last)
        except UnicodeDecodeError as error:
            # The decoder puts the bytes it kept before the chunk, so count from the chunk's end.
            place = fed + len(chunk) - len(error.object) + error.start
            problems.bad(path, place, f"invalid {encoding}")
            return
        except UnicodeError as error:  # utf-16 and utf-32 want a mark when they are named without a byte order
            problems.bad(path, fed, f"invalid {encoding}", str(error))
            return
        fed += len(chunk)
        if first and text:
            text, first = text.removeprefix("\ufeff"), False
        if text:
            yield text.encode("utf-8", MARK)


def _with_end(chunks: Iterator[bytes]) -> Iterator[tuple[bytes, bool]]:
    for chunk in chunks:
        yield chunk, False
    yield b"", True
