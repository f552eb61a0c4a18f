"""Datasets as a repository of the Hugging Face hub: shards a commit after the other, the manifests in the last one."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from data_prep.common.errors import BadInput
from data_prep.common.records import normalized
from data_prep.executor.output_folder import HELD_OUT
from data_prep.report.inspect_dataset import datasets
from megabert.common.hub_upload import Repository
from megabert.common.logs import log
from megabert.data.shards import MANIFEST, Dataset
from megabert.data.shards.remote import TOKENIZER_CONFIG

# most shards of a commit, and bytes: of a URL they are in the cache (100 GiB) together until they are uploaded
COMMIT, BYTES = 100, 32 << 30
CARD = """---
tags:
- megabert
viewer: false
---

# {name}

Shards of token ids for pre-training with MegaBERT:

```
{train}
```

| folder | rows | tokens a row | tokenizer | sources | fingerprint |
|---|---|---|---|---|---|
{rows}
"""


def push(source: str, name: str, private: bool) -> None:
    """Upload the dataset, or the datasets, of a folder or URL to the hub's dataset OWNER/NAME, with a card.

    Only what is not there is uploaded. While shards are missing there is no manifest, so a dataset is there or not, and after a kill
    the same command completes it. Raises ValueError for a dataset that is incomplete or damaged and as `Repository`, Failed if the hub
    cannot be reached.
    """
    parts = dict(_parts(source))
    wanted = {f"{at}{shard.name}": (part, shard) for at, part in parts.items() for shard in part.manifest.shards}
    repository = Repository(name, private, "dataset")
    there = repository.listing()
    missing = [path for path, (_, shard) in wanted.items() if there.get(path) != shard.sha256]
    obsolete = [path for at in parts if (path := f"{at}{MANIFEST}") in there] if missing else []
    count = max(1, min(COMMIT, BYTES // max(shard.bytes for _, shard in wanted.values())))
    for first in range(0, len(missing), count):
        paths = missing[first : first + count]
        shards = {path: wanted[path][0].shard_path(wanted[path][1]) for path in paths}
        repository.push(shards, f"Shards {first + 1} to {first + len(paths)} of {len(missing)}", removed=obsolete)
        obsolete = []
    there = repository.listing() if missing else there
    for path, (part, shard) in wanted.items():
        if there.get(path) != shard.sha256:
            raise BadInput(
                f"{part.shard_path(shard)}: SHA-256 is not the one in the manifest; the shard was changed or is damaged"
            )
    files: dict[str, Path | bytes] = {"README.md": card(name, parts)}
    for at, part in parts.items():
        files |= {posixpath.normpath(at + file): part.folder / file for file in _beside_shards(part)}
    ours = re.compile(f"({'|'.join(map(re.escape, parts))})shard-[^/]*")
    others = [path for path in there if ours.fullmatch(path) and path not in wanted]
    changed = repository.push(files, "Manifest", removed=others)
    log.info(f"hf://datasets/{name}: {len(wanted)} shards, {'the manifest last' if changed else 'all there already'}")
    left = (posixpath.split(path) for path in there if path not in files)
    if folders := sorted(folder or "." for folder, file in left if file == MANIFEST):
        log.warning(f"hf://datasets/{name}: keeps datasets of another push in {', '.join(folders)}")


def _parts(source: str) -> Iterator[tuple[str, Dataset]]:
    """The datasets of a folder or URL and their held-out parts, by the beginning of their paths in the repository."""
    for place in datasets(source):
        at = "" if normalized(str(place)) == normalized(source) else f"{posixpath.basename(str(place))}/"
        dataset = Dataset(place)
        if dataset.manifest.tokenizer["file"].startswith("../") and not at:
            raise BadInput(
                f"{source}: its tokenizer is in the folder above, which other datasets share; name that folder"
            )
        yield at, dataset
        if dataset.held_out_path:
            yield f"{at}{dataset.held_out_path.name}/", Dataset(dataset.held_out_path)


def _beside_shards(part: Dataset) -> list[str]:
    """Files of a dataset other than shards, relative to it."""
    tokenizer = part.manifest.tokenizer["file"]
    config = posixpath.join(posixpath.dirname(tokenizer), TOKENIZER_CONFIG)
    sources = [part.manifest.sources["file"]] if part.manifest.sources else []
    return [MANIFEST, tokenizer, *sources, *([config] if (part.folder / config).is_file() else [])]


def card(name: str, parts: dict[str, Dataset]) -> bytes:
    """The README.md of the repository."""
    rows = []
    for at, part in parts.items():
        m = part.manifest
        cells = [f"`{at or '.'}`", f"{m.rows:,}", m.seq_len, f"{m.tokenizer['kind']}, {m.vocab_size:,} tokens"]
        rows.append([*cells, ", ".join(part.source_names) or "not recorded", f"`{m.fingerprint}`"])
    train = [f"megabert train --data hf://datasets/{name}/{at}".rstrip("/") for at in parts if HELD_OUT not in at]
    return CARD.format(
        name=name, train="\n".join(train), rows="\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)
    ).encode()
