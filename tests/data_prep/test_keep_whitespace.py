"""Whitespace kept for code: text comes back from its ids as it was, and training and use give the same ids."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from data_prep.__main__ import main
from data_prep.text import clean
from data_prep.tokens.encoder import WordEncoder, word_facts
from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer
from megabert.hf import tokenizer_files

ROOT = Path(__file__).resolve().parents[2]
ODD = [
    "", "a", " a", "a ", "  a  b   c\t\t d", "\n", "\n\n\n", " \n \t\n ", "\n a", "\t\ta\n\tb\n", "a\n\n\n  \n b\n  ", "x" * 1200,
    "C6H12O6  +\t6 O2\n  ->  6 CO2", "def f(a):\n\treturn {\n\t    'a': a,   # b\n\t}\n\n\n", "m\u00b2 \u00a0 \u3002\u3042 \u4e2d", " " * 700 + "a",
    "end. \n\n  Next one.  Third one.", "a &amp; b\u200b  c",
]  # fmt: skip


def code():
    found = [path.read_text() for path in sorted((ROOT / "data_prep" / "readers").glob("*.py"))]
    rng = random.Random(1)
    for _ in range(40):
        found.append(
            "".join(rng.choice([" ", "  ", "\n", "\n    ", "\t", "x", "foo", "(", ".", "Bar "]) for _ in range(99))
        )
    return [text.replace("    ", "\t") if i % 4 == 0 else text for i, text in enumerate(found)]


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def built(request, tmp_path_factory):
    """A dataset of code with its tokenizer, a document a line of JSON."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "code.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in code()))
    assert main(arguments(folder, "out", "--model-type", request.param, "--vocab-size", "600", "--character-coverage", "1",
                          "--byte-fallback", "--sample-megabytes", "1", "--keep-whitespace", "--normalization", "none")) == 0  # fmt: skip
    return folder


def arguments(folder, output, *options):
    return ["build", "--input", f"{folder}/code.jsonl", "--output", f"{folder}/{output}", "--no-nsp", "--seq-len", "64",
            "--held-out", "0", "--dedup", "none", "--workers", "1", "--quiet", *options]  # fmt: skip


def test_ids_decode_to_the_same_whitespace(built):
    tokenizer = Tokenizer.load(built / "out" / "tokenizer.model")
    assert tokenizer.keeps_whitespace
    texts = [*code(), *ODD]
    used = tokenizer.encode_texts(texts)
    assert [tokenizer.decode(ids) for ids in used] == texts
    assert [ids for ids, _ in tokenizer.encode_with_offsets(texts)] == used
    encoder = WordEncoder(tokenizer, np.dtype("uint16"), "none")
    paragraphs = [clean.paragraphs(clean.decode(text.encode()).text, False, keep_whitespace=True) for text in texts]
    for its in paragraphs:
        encoder.add(its)
    batch = encoder.finish()
    edges = np.append(0, np.cumsum(batch.encoded.document_tokens()))
    for i, (text, ids) in enumerate(zip(texts, used, strict=True)):
        made = batch.encoded.tokens[edges[i] : edges[i + 1]].tolist()
        assert tokenizer.decode(made) == (text if text.strip() else "")
        if (
            len(max(text.split(), default="")) <= 512 and "  " * 300 not in text
        ):  # longer words are cut, in a dataset alone
            assert made == (ids if text.strip() else [])
    facts = word_facts(paragraphs, "none", keep_whitespace=True)
    assert (facts.facts == batch.words.facts).all() and (facts.documents == batch.words.documents).all()
    assert (np.diff(batch.words.documents)[:9] == [len(text.split()) for text in texts[:9]]).all()


def test_rows_hold_the_documents_to_the_last_blank(built):
    tokenizer = Tokenizer.load(built / "out" / "tokenizer.model")
    dataset = Dataset(built / "out")
    rows = dataset.read(np.arange(json.loads((built / "out" / "manifest.json").read_text())["rows"]))
    held = " ".join(tokenizer.decode(row) for row in rows.ids)
    lines = [line for text in code()[:4] for line in text.split("\n") if len(line.split()) == 1]
    found = sum(f"\n{line}\n" in held for line in lines)
    assert len(lines) > 50 and found > 0.7 * len(lines)  # a row may end anywhere
    assert len(tokenizer.encode_batch(["\n        a"])[0]) < 6  # indentation has pieces


def test_exported_tokenizer_gives_the_same_ids(built):
    tokenizer = Tokenizer.load(built / "out" / "tokenizer.model")
    exported = tokenizer_files.build(tokenizer)
    texts = [text for text in [*code(), *ODD] if text]
    encoded = exported.encode_batch(texts, add_special_tokens=False)
    assert [e.ids for e in encoded] == tokenizer.encode_texts(texts)
    assert [exported.decode(e.ids) for e in encoded] == texts


def test_whitespace_options_must_match_the_tokenizer(built, capsys):
    given = ("--tokenizer", f"{built}/out/tokenizer.model")
    kept = ("--keep-whitespace", "--normalization", "none")
    (built / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    other = str(ROOT / "tests" / "data" / "golden" / "dataset" / "tokenizer.model")
    for options, said in (
        (
            given,
            f"--tokenizer {built}/out/tokenizer.model: keeps whitespace; give --keep-whitespace --normalization none",
        ),
        (("--tokenizer", other, *kept), f"--keep-whitespace: {other} was not trained to keep whitespace"),
        (("--tokenizer", f"{built}/vocab.txt", *kept), "vocab.txt is WordPiece, which forgets whitespace"),
        (("--model-type", "wordpiece", *kept), "--keep-whitespace: WordPiece forgets whitespace; take --model-type"),
        (("--keep-whitespace",), "--keep-whitespace: takes --normalization none"),
    ):
        assert main(arguments(built, "refused", *options)) == 2
        assert said in capsys.readouterr().err
    assert main(arguments(built, "again", *given, *kept)) == 0
    first, again = ((built / name / "shard-000000.tar").read_bytes() for name in ("out", "again"))
    assert first == again
