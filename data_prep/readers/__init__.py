"""Readers, from input names to documents.

To add a format, write a splitter, a function from a `streams.Stream` to (place, text) of each document, and register
it: in `documents.SPLITTERS`, its name in `common.records.FORMATS`, and the first bytes of its files in
`detection.BEGINNINGS`. Formats that are not streams of text (tables, archives) are in `documents.SOURCES`,
compressions in `decompress.COMPRESSIONS`, and kinds of plain-text documents in `lines.BY_KIND`.
"""
