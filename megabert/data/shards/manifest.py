"""Manifest of a dataset: a model of `manifest.json` that checks every field and refuses unknown ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator, with_config
from typing_extensions import TypedDict  # pydantic takes typing's own from Python 3.12 on

from megabert.common import storage
from megabert.common.files import compact, digest, parse_object, refuse_newer, sealed, write_atomically
from megabert.data.shards.layout import shard_bytes

MANIFEST, SCHEMA = "manifest.json", 1
SHARD = "shard-{:06d}.tar"
SOURCES = "sources.npy"
FINGERPRINT = "fingerprint"
SPECIAL = ("pad", "unk", "cls", "sep", "mask")
# message by pydantic's kind of error
MESSAGES = {
    "missing": "is missing",
    "extra_forbidden": f"is not a field of schema {SCHEMA}",
    "model_type": "must hold name, rows, bytes and sha256",
}

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=1)]


@with_config(ConfigDict(strict=True, extra="allow"))
class TokenizerEntry(TypedDict):
    """The tokenizer of a dataset; `file` is in the dataset's folder or its parent."""

    kind: Literal["sentencepiece", "wordpiece", "tokenizers"]
    file: Annotated[str, Field(pattern=r"^(\.\./)?\w[\w.-]*$")]
    sha256: Sha256
    vocab_size: Annotated[int, Field(ge=6, lt=2**31)]
    special_ids: dict[str, Annotated[int, Field(ge=0)]]


@with_config(ConfigDict(strict=True, extra="allow"))
class HeldOutEntry(TypedDict):
    """The dataset of held-out documents, or of held-out passages, with their number and approximate length in tokens."""

    path: Literal["held_out"]
    rows: Count
    manifest_sha256: Sha256
    passages: NotRequired[Count]
    passage_tokens: NotRequired[Count]


@with_config(ConfigDict(strict=True, extra="allow"))
class SourcesEntry(TypedDict):
    """The file that assigns one of `names` to each sequence of the held-out rows."""

    file: Literal["sources.npy"]
    sha256: Sha256
    names: Annotated[list[Annotated[str, Field(pattern=r"^[\w.-]+$")]], Field(min_length=2, max_length=255)]


class Shard(BaseModel):
    """One shard as the manifest lists it: file name, rows, size in bytes, SHA-256 in hex."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    name: str
    rows: Count
    bytes: int
    sha256: Sha256


class Manifest(BaseModel):
    """`manifest.json`, checked strictly.

    `fingerprint` is the SHA-256 of the compact JSON of all other fields, so that any change is detected. `order`
    is the version of the rows' order (`megabert.data.order`).
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    schema_number: Literal[1] = Field(alias="schema")
    seq_len: Annotated[int, Field(ge=4, le=65535)]
    max_sequences: Count
    rows: Count
    block_rows: Annotated[int, Field(ge=1, le=2**20)]
    dtype: Literal["uint16", "uint32"]
    tokenizer: TokenizerEntry
    statistics: dict[str, Any]
    options: dict[str, Any]
    shards: Annotated[tuple[Shard, ...], Field(strict=False)]
    held_out: HeldOutEntry | None
    sources: SourcesEntry | None = None
    order: Literal[2]
    fingerprint: str = Field(repr=False)

    @property
    def rows_per_shard(self) -> int:
        """Rows of every shard but the last."""
        return self.shards[0].rows

    @property
    def vocab_size(self) -> int:
        return self.tokenizer["vocab_size"]

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        """Fields agree with each other."""
        vocab, special = self.vocab_size, self.tokenizer["special_ids"]
        if self.max_sequences > self.seq_len:
            raise ValueError(f"max_sequences must be at most seq_len={self.seq_len}, is {self.max_sequences}")
        if missing := set(SPECIAL) - special.keys():
            raise ValueError(f"tokenizer.special_ids.{min(missing)} is missing")
        if max(special.values()) >= vocab:
            raise ValueError(f"tokenizer.special_ids must lie in 0..{vocab - 1}")
        # a tokenizer may lack a token for unknown words or for padding
        if len({i for name, i in special.items() if name not in ("unk", "pad")}) < len(special) - 2:
            raise ValueError("tokenizer.special_ids must be distinct")
        if self.dtype != (want := "uint32" if vocab > 65535 else "uint16"):
            raise ValueError(f"dtype must be {want!r} for {vocab} tokens, is {self.dtype!r}")
        for i, shard in enumerate(self.shards):
            if shard.name != (name := SHARD.format(i)):
                raise ValueError(f"shards[{i}].name must be {name!r}, is {shard.name!r:.60}")
            first, last = self.rows_per_shard, i + 1 == len(self.shards)
            if i and (first % self.block_rows or shard.rows > first or (shard.rows < first and not last)):
                raise ValueError(
                    f"shards[{i}].rows is {shard.rows}: all shards but the last hold equal numbers of whole blocks"
                )
            size = shard_bytes(shard.rows, self.block_rows, self.seq_len, self.max_sequences, self.dtype)
            if shard.bytes != size:
                raise ValueError(f"shards[{i}].bytes must be {size}, is {shard.bytes}")
        if (rows := sum(shard.rows for shard in self.shards)) != self.rows:
            raise ValueError(f"rows is {self.rows}, but the shards hold {rows}")
        return self

    @staticmethod
    def load(folder: str | os.PathLike[str]) -> Manifest:
        """Read and check `folder/manifest.json`, also of a URL. ValueError names the file and the field."""
        return Manifest.parse(Manifest.read(folder), os.path.join(folder, MANIFEST))

    @staticmethod
    def read(folder: str | os.PathLike[str]) -> bytes:
        """The text of `folder/manifest.json`. Raises ValueError where there is none."""
        path = os.path.join(folder, MANIFEST)
        try:
            return storage.read(path) if storage.is_url(path) else Path(path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(f"{path}: not found; a dataset is made by `python -m data_prep build`") from None

    @staticmethod
    def parse(text: bytes, where: str) -> Manifest:
        """Check the text of a manifest; `where` is the file name at the beginning of errors."""
        raw = parse_object(text, where, "; rebuild the dataset")
        refuse_newer(raw.get("schema"), SCHEMA, where)
        try:
            manifest = Manifest.model_validate(raw)
        except ValidationError as error:
            raise ValueError(f"{where}: {_first(error)}") from None
        if manifest.fingerprint != digest(raw, FINGERPRINT, compact):
            raise ValueError(
                f"{where}: fingerprint is not that of the other fields: one of them was changed; rebuild the dataset"
            )
        return manifest


def _first(error: ValidationError) -> str:
    """The first error, on one line: `shards[1].rows must …`."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    message = MESSAGES.get(first["type"]) or f"is {first['input']!r:.60}: {first['msg'].lower()}"
    return " ".join(f"{field} {message}".split())


def write_manifest(folder: str | os.PathLike[str], manifest: dict[str, Any]) -> None:
    """Check `manifest`, then commit it with its fingerprint as `folder/manifest.json`, last and atomically."""
    path = Path(folder) / MANIFEST
    data = sealed(manifest, FINGERPRINT, compact)
    Manifest.parse(data, str(path))
    write_atomically(path, data)
