"""Datasets on disk: their manifest, shards, verified random access and verification.

Data from a shard is used only after its checksum was compared, and nothing in a shard is ever executed. A dataset is a
folder: `manifest.json`, a tokenizer file and shards. A shard is a plain ustar tar of blocks, one webdataset sample a block, and
its bytes are a function of its arrays alone. Every header is known in advance, so a row's byte offset follows from the manifest,
rows are read through a read-only map without parsing, and `verify` compares headers instead of interpreting them.

Legend: n requested rows, R rows a block, T row length, S sequences a row.

    KEY.ids.npy     uint16 | uint32 [R, T]   token ids, padded at the tail with 0
    KEY.bounds.npy  uint16 [R, S, 2]         (length, length of `[CLS] A [SEP]`) of each sequence; 0, 0 in unused slots
    KEY.isnext.npy  int8   [R, S]            0: B follows A in the text, 1: random B, -1: no pair or no sequence
    KEY.crc.npy     uint32 [R]               zlib.crc32 of the row's ids, bounds and isnext bytes, in that order
"""

from megabert.data.shards.dataset import DamagedRow, Dataset, Rows
from megabert.data.shards.layout import write_shard
from megabert.data.shards.manifest import MANIFEST, Manifest, write_manifest
from megabert.data.shards.remote import Cache, dataset_folder
from megabert.data.shards.verification import ShardCheck, plan, verify
