"""Elements of marked-up text, and the splitter of WikiExtractor's, `<doc …>` to `</doc>`."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

from data_prep.readers import streams
from data_prep.readers.lines import SENTENCE_END
from data_prep.readers.streams import LONG_DOCUMENT, UNCLOSED, Slice, Stream

# formats whose documents are elements: they can be found from any byte on, and their paragraphs are lines
ELEMENTS = ("wiki", "mediawiki")
# changes of text
OUTSIDE, BETWEEN = "text after an end tag", "text outside of a <doc>"
NO_ELEMENT = "no document in markup"
DOC_TAG = re.compile(rb'<doc(?:\s+[\w:.-]+="[^"]*")*\s*>')
TITLE = re.compile(rb'\stitle="(.*?)"(?:>|\s+[\w:.-]+=")')


def split_elements(stream: Stream, name: str, opening: bytes) -> Iterator[Slice]:
    """Elements `name`, without their end tag, that begin before the end of the range.

    `opening` is the pattern of the start tag, up to its attributes. Text between elements is ignored (that of a dump's siteinfo) or
    counted (for `doc`), and so is text before an unmatched end tag. An element is unclosed if another one begins, or the file ends,
    inside it. A file without an element is bad; its first range is read until there is one.
    """
    closing = b"</%s>" % name.encode()
    tags = re.compile(opening + b"|" + closing)
    base = stream.begin  # offset of the buffer
    begin: int | None = None  # offset of the open element
    inside = not stream.first  # the range may begin in an element of the one before
    is_long = False  # the open element, which is reported with its bytes at the next tag
    none_yet = stream.first  # no element in the file so far
    outside = False  # whether there is text since the last element
    counts_text = stream.first  # whether such text belongs to the range, as the end tag before it does
    buffer, at = b"", 0  # at: end of the searched part of `buffer`

    def bad(start: int, end: int) -> None:
        if is_long:
            stream.lost(LONG_DOCUMENT, end - start)
        elif end - start > streams.MAX_DOCUMENT:
            stream.too_long(start, f"a <{name}>", streams.MAX_DOCUMENT, end - start)
        else:
            stream.bad(start, UNCLOSED, f"a <{name}> without </{name}>", end - start)

    for chunk in stream.chunks:
        buffer += chunk
        for match in tags.finditer(buffer, at):
            place = base + match.start()
            outside = begin is None and not inside and (outside or bool(buffer[at : match.start()].strip()))
            if match.group() != closing:
                if outside and counts_text and name == "doc":
                    stream.problems.changed[BETWEEN] += 1
                if begin is not None:
                    bad(begin, place)
                if stream.end is not None and place >= stream.end:
                    return
                begin, none_yet = place, False
            elif begin is not None:
                if is_long or place - begin > streams.MAX_DOCUMENT:
                    bad(begin, place)
                else:
                    yield begin, buffer[begin - base : match.start()]
                begin = None
            elif outside and counts_text:
                stream.problems.changed[OUTSIDE] += 1
            counts_text = stream.holds(place)
            inside, is_long, outside, at = False, False, False, match.end()
        rest = max(at, len(buffer) - len(closing) + 1)  # what follows may be a partial tag
        outside = begin is None and not inside and (outside or bool(buffer[at:rest].strip()))
        at = rest
        if begin is not None and not is_long and base + at - begin > streams.MAX_DOCUMENT:
            bad(begin, begin + streams.MAX_DOCUMENT + 1)
            begin, is_long = begin + streams.MAX_DOCUMENT + 1, True
        if begin is None and not (none_yet or counts_text) and stream.end is not None and base + at >= stream.end:
            return
        cut = at if begin is None or is_long else begin - base
        buffer, base, at = buffer[cut:], base + cut, at - cut
    if begin is not None:
        bad(begin, base + len(buffer))
    elif none_yet:
        stream.bad(0, NO_ELEMENT, f"no <{name}> in it", base + len(buffer))
    elif name == "doc" and counts_text and not inside and (outside or buffer[at:].strip()):
        stream.problems.changed[BETWEEN] += 1


def split_wiki(stream: Stream) -> Iterator[Slice]:
    """The text of each `<doc …>` element after its tag and title.

    The title is the first line if it equals the tag's `title`, or if a blank line follows it and it does not end like a sentence.
    Without `title` all lines are text.
    """
    for offset, element in split_elements(stream, "doc", rb"<doc(?=[\s>])"):
        tag = DOC_TAG.match(element)
        first_line = element.find(b"\n") + 1 or len(element)
        # a title may hold quotation marks
        tag_end = tag.end() if tag else max(element.rfind(b'">', 0, first_line) + 1, element.find(b">")) + 1
        text = element[tag_end:].lstrip(b"\r\n")
        title = TITLE.search(element[:tag_end])
        line, _, rest = text.partition(b"\n")
        if title:
            named, shown = (html.unescape(part.decode(errors="replace")).split() for part in (title[1], line))
            apart = rest.strip() and not rest.partition(b"\n")[0].strip() and not SENTENCE_END.search(" ".join(shown))
            if shown and (named == shown or apart):
                stream.problems.changed["title of a <doc>"] += 1
                text = rest
        yield offset + len(element) - len(text), text
