"""A manifest that was loaded is whole and consistent: every field was checked, and none is unknown."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megabert.data.shards.layout import shard_bytes

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Shard:
    """One shard as the manifest lists it: file name, rows, size in bytes, SHA-256 in hex."""

    name: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """`manifest.json`, checked strictly.

    `fingerprint` is the SHA-256 of the canonical JSON (sorted keys, no spaces) of all other fields. The file holds it
    too, so that no change of any field goes unseen; manifests written before it did are taken without.
    """

    seq_len: int
    max_sequences: int
    rows: int
    block_rows: int
    dtype: str
    tokenizer: dict[str, Any]
    statistics: dict[str, Any]
    options: dict[str, Any]
    shards: tuple[Shard, ...]
    held_out: dict[str, Any] | None
    fingerprint: str = field(repr=False)

    @property
    def rows_per_shard(self) -> int:
        """Rows of every shard but the last."""
        return self.shards[0].rows

    @property
    def vocab_size(self) -> int:
        return self.tokenizer["vocab_size"]

    @property
    def special_ids(self) -> dict[str, int]:
        return self.tokenizer["special_ids"]

    @staticmethod
    def load(folder: str | os.PathLike[str]) -> Manifest:
        """Read and check `folder/manifest.json`. ValueError names the file and the field."""
        path = Path(folder) / MANIFEST
        try:
            text = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(f"{path}: not found; a dataset is made by `python -m data_prep build`") from None
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: not valid JSON ({error}); rebuild the dataset") from None
        return Manifest.parse(raw, str(path))

    @staticmethod
    def parse(raw: Any, where: str = MANIFEST) -> Manifest:
        """Check a manifest as parsed from JSON; `where` is the file name that errors begin with."""

        def bad(name: str, why: str) -> ValueError:
            return ValueError(f"{where}: {name} {why}")

        def get(table: dict[str, Any], name: str, kind: type, low: int = 0, high: int = 2**62) -> Any:
            value = table.get(name.rsplit(".", 1)[-1])
            if type(value) is not kind:
                raise bad(name, f"must be of type {kind.__name__}, is {value!r:.60}")
            if type(value) is int and not low <= value <= high:
                raise bad(name, f"must lie in {low}..{high}, is {value}")
            return value

        def sha(table: dict[str, Any], name: str) -> str:
            if not re.fullmatch("[0-9a-f]{64}", value := get(table, name, str)):
                raise bad(name, f"must be 64 hex digits, is {value!r:.60}")
            return value

        if type(raw) is not dict:
            raise bad("the file", "must hold one JSON object")
        known = {
            "schema",
            "seq_len",
            "max_sequences",
            "rows",
            "block_rows",
            "dtype",
            "tokenizer",
            "statistics",
        }
        known |= {"options", "shards", "held_out"}
        for name in sorted(known ^ (raw.keys() - {"fingerprint"})):
            raise bad(name, "is missing" if name in known else "is not a field of schema 1")
        get(raw, "schema", int, 1, 1)
        seq_len = get(raw, "seq_len", int, 4, 65535)
        max_sequences = get(raw, "max_sequences", int, 1, seq_len)
        rows = get(raw, "rows", int, 1)
        block_rows = get(raw, "block_rows", int, 1, 2**20)
        tokenizer = get(raw, "tokenizer", dict)
        if get(tokenizer, "tokenizer.kind", str) not in ("sentencepiece", "wordpiece"):
            raise bad(
                "tokenizer.kind", f"must be 'sentencepiece' or 'wordpiece', is {tokenizer['kind']!r:.60}"
            )
        if not re.fullmatch(r"(\.\./)?\w[\w.-]*", file := get(tokenizer, "tokenizer.file", str)):
            raise bad(
                "tokenizer.file", f"must name a file in the dataset's folder or its parent, is {file!r:.60}"
            )
        sha(tokenizer, "tokenizer.sha256")
        vocab = get(tokenizer, "tokenizer.vocab_size", int, 6, 2**31 - 1)
        special = get(tokenizer, "tokenizer.special_ids", dict)
        for name in special.keys() | {"pad", "unk", "cls", "sep", "mask"}:
            get(special, f"tokenizer.special_ids.{name}", int, 0, vocab - 1)
        if len(set(special.values())) < len(special) or special["pad"] != 0:
            raise bad("tokenizer.special_ids", "must be distinct, with pad 0")
        dtype = get(raw, "dtype", str)
        if dtype != (want := "uint32" if vocab > 65535 else "uint16"):
            raise bad("dtype", f"must be {want!r} for {vocab} pieces, is {dtype!r:.60}")
        shards: list[Shard] = []
        listed = get(raw, "shards", list)
        for i, entry in enumerate(listed):
            at = f"shards[{i}]"
            if type(entry) is not dict or entry.keys() != {"name", "rows", "bytes", "sha256"}:
                raise bad(at, "must hold name, rows, bytes and sha256")
            if get(entry, f"{at}.name", str) != f"shard-{i:06d}.tar":
                raise bad(f"{at}.name", f"must be 'shard-{i:06d}.tar', is {entry['name']!r:.60}")
            n = get(entry, f"{at}.rows", int, 1, rows)
            if i and (
                shards[0].rows % block_rows
                or n > shards[0].rows
                or (n < shards[0].rows and i + 1 < len(listed))
            ):
                raise bad(f"{at}.rows", f"is {n}: all shards but the last hold equal numbers of whole blocks")
            size = shard_bytes(n, block_rows, seq_len, max_sequences, dtype)
            get(entry, f"{at}.bytes", int, size, size)
            shards.append(Shard(entry["name"], n, size, sha(entry, f"{at}.sha256")))
        if sum(shard.rows for shard in shards) != rows:
            raise bad("rows", f"is {rows}, but the shards hold {sum(shard.rows for shard in shards)}")
        held_out = raw["held_out"]
        if held_out is not None:
            held_out = get(raw, "held_out", dict)
            if get(held_out, "held_out.path", str) != "held_out":
                raise bad("held_out.path", f"must be 'held_out', is {held_out['path']!r:.60}")
            get(held_out, "held_out.rows", int, 1)
            sha(held_out, "held_out.manifest_sha256")
        statistics, options = get(raw, "statistics", dict), get(raw, "options", dict)
        if (fingerprint := fingerprint_of(raw)) != raw.get("fingerprint", fingerprint):
            raise bad(
                "fingerprint", "is not that of the other fields: one of them was changed; rebuild the dataset"
            )
        return Manifest(
            seq_len,
            max_sequences,
            rows,
            block_rows,
            dtype,
            tokenizer,
            statistics,
            options,
            tuple(shards),
            held_out,
            fingerprint,
        )


def fingerprint_of(manifest: dict[str, Any]) -> str:
    """SHA-256 in hex of the canonical JSON of a manifest as parsed from JSON, its own fingerprint left out."""
    fields = {name: value for name, value in manifest.items() if name != "fingerprint"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def render(manifest: dict[str, Any]) -> str:
    """The text of a manifest file: sorted keys, indent 1."""
    return json.dumps(manifest, sort_keys=True, indent=1) + "\n"


def write_manifest(folder: str | os.PathLike[str], manifest: dict[str, Any]) -> None:
    """Check `manifest`, then commit it with its fingerprint as `folder/manifest.json`, last and atomically."""
    path = Path(folder) / MANIFEST
    manifest = manifest | {"fingerprint": fingerprint_of(manifest)}
    Manifest.parse(manifest, str(path))
    temporary = path.with_name(f".{MANIFEST}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(render(manifest))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
