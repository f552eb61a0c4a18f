"""A dataset that an earlier revision built: it opens, verifies, and the same input still gives its bytes."""

import hashlib
import json
from pathlib import Path

import numpy as np

from megabert.data.shards import Dataset, Manifest, verify
from megabert.data.tokenizer import Tokenizer

OLD = Path(__file__).resolve().parents[1] / "data" / "old_formats"
FINGERPRINT = "ae0468b603c02c5f6f5ae68aa8461deadc19edba76f2402ef11db37cc0d49536"
SHARDS = {
    "shard-000000.tar": "203f2dc7f3a4e70b42bb37c99247ae70b972763cf30dd87ff3f4049e9256ad38",
    "shard-000001.tar": "204bdc95b01e807bbacfc495c32302d5c8362f1f9dfc08d89cfca7f6aefc09dd",
    "shard-000002.tar": "cbf9d0d9e10396c0c51767426ebcf2d7afdf8b879da8dafde2925ef3357fc891",
    "held_out/shard-000000.tar": "329fafd25f5b4377d2afb29236444ccef3c943d540815006f79252512afc9e2b",
}
# row -> (ids at the head, (length, length of A) of each sequence, is-next labels, words at the head)
ROWS = {
    0: ([2, 255, 239, 7, 5, 502, 37, 427], [[64, 55], [0, 0]], [1, -1], "ention, softmax-mask, masked-LM loss and the"),
    300: ([2, 40, 98, 31, 21, 11, 5, 17], [[64, 36], [0, 0]], [0, -1], "The text that a template of SPOKEN or"),
    535: ([2, 5, 15, 66, 547, 26, 6, 41], [[64, 33], [0, 0]], [1, -1], "and from random ones with the same tokenizer,"),
}  # fmt: skip


ORDER = "dcf5e39933ad94aa39424e5046607f4c08da51b7d5bbb8b03cb2ed32e82d2f14"  # SHA-256 of the row ids at the first 1,200 positions under seed 5: two epochs and some


def digests(folder):
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in SHARDS}


def test_an_old_dataset_opens_and_holds_what_it_held():
    manifest = Manifest.load(OLD / "dataset")
    assert manifest.fingerprint == FINGERPRINT and manifest.rows == 536 and manifest.seq_len == 64
    assert digests(OLD / "dataset") == SHARDS
    assert list(verify(OLD / "dataset")) == []
    tokenizer = Tokenizer.load(OLD / "dataset" / "tokenizer.model")
    rows = Dataset(OLD / "dataset").read(np.array(list(ROWS)))
    for i, (ids, bounds, labels, words) in enumerate(ROWS.values()):
        assert rows.ids[i, :8].tolist() == ids
        assert rows.bounds[i].tolist() == bounds and rows.isnext[i].tolist() == labels
        assert tokenizer.decode(rows.ids[i]).startswith(words)
    assert Manifest.load(OLD / "dataset" / "held_out").rows == 28
    order = Dataset(OLD / "dataset").order(5, np.arange(1200))[0]
    assert hashlib.sha256(order.astype("<i8").tobytes()).hexdigest() == ORDER


def test_the_same_input_still_gives_the_same_bytes(command, tmp_path):
    """Every stage has a part in it: weights, rules, all three kinds of duplicates, held-out documents, three shards."""
    output = tmp_path / "out"
    result = command(
        "build", "--input", f"modules={OLD / 'text/modules.jsonl.gz'}", f"notes={OLD / 'text/notes.txt'}", "--weight", "notes=2.5",
        "--text-documents", "blank-line", "--tokenizer", OLD / "dataset" / "tokenizer.model", "--output", output,
        "--seq-len", 64, "--dedup", "documents", "near", "paragraphs", "--filters", "min-words=20", "max-duplicate-lines=0.3",
        "--held-out", 0.04, "--rows-per-shard", 256, "--seed", 5, "--workers", 2, "--quiet",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert digests(output) == SHARDS
    # All of the manifest is as it was, but for the version of the rows' order, which the held-out part's names too.
    old, new = (json.loads((folder / "manifest.json").read_text()) for folder in (OLD / "dataset", output))
    for its in (old, new):
        its["held_out"]["manifest_sha256"] = its["fingerprint"] = ""
    assert new == old | {"order": 2}
    reasons = json.loads((output / "report.json").read_text())["dropped"]
    assert reasons["reasons"] == {"empty": 1, "exact duplicate": 2, "min-words": 15, "near duplicate": 3}
    assert reasons["repeated_paragraphs"] == 1
