"""A dataset that was built once is read as it was, and the same input and options give its bytes again."""

import hashlib
import json
from pathlib import Path

import numpy as np

from megabert.data.shards import Dataset, verify
from megabert.data.tokenizer import Tokenizer
from tests.helpers.prep_builds import build_here

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden"
SHARDS = ("shard-000000.tar", "shard-000001.tar", "shard-000002.tar", "held_out/shard-000000.tar")
# the manifest's, over the SHA-256 of every shard
FINGERPRINT = "f2d13e708ebaa25139798bfcb8d02df194d15408bcce57b05d7128afbab41567"
# SHA-256 of the row ids at the first 1,200 positions under seed 5: more than two epochs
ORDER = "72f87b5d3e288b023b5c7fefedbd6521c5d1a01f8fd3d39b7c0b176409bdbbb0"
# row -> (first ids, (length, length of A) of each sequence, is-next labels, first words)
ROWS = {
    0: ([2, 255, 239, 7, 5, 502, 37, 427], [[64, 55], [0, 0]], [1, -1], "ention, softmax-mask, masked-LM loss and the"),
    300: ([2, 40, 98, 31, 21, 11, 5, 17], [[64, 36], [0, 0]], [0, -1], "The text that a template of SPOKEN or"),
    535: ([2, 5, 15, 66, 547, 26, 6, 41], [[64, 33], [0, 0]], [1, -1], "and from random ones with the same tokenizer,"),
}


def test_a_golden_dataset_holds_its_rows():
    dataset = Dataset(GOLDEN / "dataset")
    assert dataset.manifest.fingerprint == FINGERPRINT and list(verify(GOLDEN / "dataset")) == []
    tokenizer = Tokenizer.load(dataset.tokenizer_path)
    rows = dataset.read(np.array(list(ROWS)))
    for i, (ids, bounds, labels, words) in enumerate(ROWS.values()):
        assert rows.ids[i, :8].tolist() == ids
        assert rows.bounds[i].tolist() == bounds and rows.isnext[i].tolist() == labels
        assert tokenizer.decode(rows.ids[i]).startswith(words)
    order = dataset.order(5, np.arange(1200))[0]
    assert hashlib.sha256(order.astype("<i8").tobytes()).hexdigest() == ORDER


def test_the_same_input_gives_the_same_bytes(tmp_path):
    """Every stage takes part: weights, filters, all three kinds of duplicates, held-out documents, three shards."""
    output, text = tmp_path / "out", GOLDEN / "text"
    options = {"weight": "notes=2.5", "text_documents": "blank-line", "seq_len": 64, "nsp": True, "held_out": 0.04}
    options |= {"dedup": ("documents", "near", "paragraphs"), "filters": ("min-words=20", "max-duplicate-lines=0.3")}
    options |= {"tokenizer": GOLDEN / "dataset" / "tokenizer.model", "rows_per_shard": 256, "seed": 5, "workers": 2}
    report = build_here([f"modules={text / 'modules.jsonl.gz'}", f"notes={text / 'notes.txt'}"], output, **options)
    for name in SHARDS:
        assert (output / name).read_bytes() == (GOLDEN / "dataset" / name).read_bytes(), name
    # an option that is added later is listed in later manifests, and so changes their fingerprints
    built, golden = (json.loads((folder / "manifest.json").read_text()) for folder in (output, GOLDEN / "dataset"))
    for tree in (built, golden):
        del tree["options"], tree["fingerprint"], tree["held_out"]["manifest_sha256"]
    unknown = [built["statistics"].pop(f"unknown_{unit}_share") for unit in ("token", "character")]
    assert built == golden and unknown == [0.001218, 0.000594]
    dropped = report["dropped"]
    assert dropped["reasons"] == {"empty": 1, "exact duplicate": 2, "min-words": 15, "near duplicate": 3}
    assert dropped["repeated_paragraphs"] == 1
