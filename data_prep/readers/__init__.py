"""Readers, from input names to documents.

A format is a function and an entry. A splitter is a function from a `streams.Stream`, the unpacked bytes of a file or of a member of an
archive, to (place, text) of each document; its entry is in `documents.SPLITTERS`, its name in `common.records.FORMATS`, and what its files
begin with in `detection.BEGINNINGS`. A file that is no stream of text, as a table or an archive, has an entry in `documents.SOURCES`,
a compression one in `decompress.COMPRESSIONS`, and what a document is in plain text one in `lines.BY_KIND`.
"""
