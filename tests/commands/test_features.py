"""Vectors are transformers' own, in the order of the input and whatever the batches; a mistake is one line and no file."""

import gzip
import resource
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import transformers

import megabert
from megabert import hf
from megabert.commands import export, extraction, features
from megabert.commands.extraction import Extractor
from megabert.distributed.ranks import World
from tests.helpers import fast_tokenizers, runs
from tests.helpers.ranks import run_ranks
from tests.helpers.refusal import refusal

TEXTS = [
    "The quick brown fox jumps over the lazy dog near the river bank.",
    "sea shells",
    "A language model learns which words follow which, and how often they do so.",
    "She sells sea shells by the sea shore; the shells she sells are surely sea shells.",
    "dog",
]
POOLED = [("cls", ".npy", "fp32"), ("mean", ".parquet", "fp32"), ("max", ".npy", "fp32"), ("mean", ".npy", "bf16")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 layers of 32, and its export beside it, `hf`."""
    folder = runs.make(tmp_path_factory.mktemp("model") / "run", "uncased", layers=4, max_positions=100)
    export.export(folder, folder.with_name("hf"))
    return folder


@pytest.fixture(scope="module")
def peer(run: Path) -> Any:
    """transformers' five hidden states [tokens, 32] of a text or pair, with [CLS] and [SEP]."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.with_name("hf"))
    model = transformers.BertModel.from_pretrained(run.with_name("hf")).eval()

    @torch.no_grad()
    def states(*texts: str) -> list[np.ndarray]:
        out = model(**tokenizer(*texts, return_tensors="pt"), output_hidden_states=True)
        return [state[0].numpy() for state in out.hidden_states]

    return states


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    (tmp_path / "lines.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    return tmp_path / "lines.txt"


def command(model: Path, input: Path, output: Path, *more: str) -> list[str]:
    return ["--model", str(model), "--input", str(input), "--output", str(output), *more]


def tokens_of(path: Path) -> dict[str, np.ndarray]:
    """`ids` and `vectors` of all texts behind each other, and their `lengths`."""
    table = pq.read_table(path)
    rows = {name: table[name].to_pylist() for name in ("ids", "vectors", "tokens")}
    assert [len(row) for row in rows["tokens"]] == [len(row) for row in rows["ids"]]
    joined = {name: np.concatenate([np.array(row) for row in rows[name]]) for name in ("ids", "vectors")}
    return joined | {"lengths": np.array([len(row) for row in rows["ids"]])}


@pytest.mark.parametrize("layers", ["last", "0", "3,4,0", "1+last+3"])
def test_layers_are_transformers_own(layers: str, run: Path, peer: Any, lines: Path) -> None:
    output = lines.with_suffix(".parquet")
    assert features.main(command(run, lines, output, "--pool", "none", "--layers", layers, "--batch-tokens", "30")) == 0
    found, want = tokens_of(output), []
    for text in TEXTS:
        states = peer(text)
        chosen = [states[int(i)] for i in layers.replace("last", "4").replace("+", ",").split(",")]
        want.append(sum(chosen) if "+" in layers else np.concatenate(chosen, 1))
    assert found["lengths"].tolist() == [len(states) for states in want]
    assert found["vectors"].shape == np.concatenate(want).shape
    assert np.abs(found["vectors"] - np.concatenate(want)).max() <= 1e-5


@pytest.mark.parametrize(("pool", "ending", "precision"), POOLED)
def test_pooled_is_a_vector_a_text(pool: str, ending: str, precision: str, run, peer, lines) -> None:
    output = lines.with_suffix(ending)
    assert features.main(command(run, lines, output, "--pool", pool, "--precision", precision)) == 0
    if ending == ".npy":
        found = np.load(output)
        assert found.dtype == np.float32
    else:
        table = pq.read_table(output)
        assert table.column_names == ["vector"] and table["vector"].type.list_size == 32
        found = np.array(table["vector"].to_pylist())
    of = {"cls": lambda x: x[0], "mean": lambda x: x.mean(0), "max": lambda x: x.max(0)}[pool]
    difference = np.abs(found - np.stack([of(peer(text)[-1]) for text in TEXTS])).max()
    assert found.shape == (5, 32)
    assert difference <= 1e-5 if precision == "fp32" else 1e-5 < difference < 3e-2


def test_small_batches_keep_order_and_cut_texts(run: Path, peer: Any, lines: Path, capsys) -> None:
    """Two tokens a batch, so that a window has a text or two; texts above 30 tokens are cut."""
    output = lines.with_suffix(".parquet")
    options = ["--pool", "none", "--batch-tokens", "2", "--max-length", "30"]
    assert features.main(command(run, lines, output, *options)) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{output}: vectors of 5 texts\n"
    assert "warning: 3 of them are longer than 30 tokens and lost their end" in shown.err
    lengths = [len(peer(text)[0]) for text in TEXTS]
    found, tokenizer = tokens_of(output), hf.load(run).tokenizer
    assert found["lengths"].tolist() == [min(n, 30) for n in lengths] and max(lengths) > 30
    ends = found["lengths"].cumsum()
    for i in (1, 4):
        vectors = found["vectors"][ends[i] - lengths[i] : ends[i]]
        assert np.abs(vectors - peer(TEXTS[i])[-1]).max() <= 1e-5
    table = pq.read_table(output)
    ids = [tokenizer.cls_id, *tokenizer.encode_batch([TEXTS[1]])[0], tokenizer.sep_id]
    assert table["ids"][1].as_py() == ids and table["tokens"][1].as_py() == [tokenizer.tokens[i] for i in ids]
    assert table["ids"][0][29].as_py() == tokenizer.sep_id
    assert pq.ParquetFile(output).metadata.num_row_groups > 1
    assert sorted(path.name for path in output.parent.iterdir()) == sorted([lines.name, output.name])


def test_a_table_gives_its_columns_texts(run: Path, peer: Any, tmp_path: Path) -> None:
    """By the Hugging Face folder. Other formats of tables are those of `megabert.common.tables`."""
    path, output = tmp_path / "texts.csv.gz", tmp_path / "out.npy"
    path.write_bytes(gzip.compress(b'a,n\r\n"the lazy dog, she sells",1\r\n"a ""quick"" fox",1\r\n'))
    assert features.main(command(run.with_name("hf"), path, output, "--text", "a")) == 0
    want = np.stack([peer(text)[-1].mean(0) for text in ("the lazy dog, she sells", 'a "quick" fox')])
    assert np.abs(np.load(output) - want).max() <= 1e-5


def test_lines_keep_their_spaces(tmp_path: Path) -> None:
    """Of which byte-level BPE makes tokens, as of the texts of `encode`."""
    (tmp_path / "lines.txt").write_text("dog\n dog\n")
    model = runs.make(tmp_path / "run", str(fast_tokenizers.write(tmp_path / "tokenizer.json")))
    assert features.main(command(model, tmp_path / "lines.txt", tmp_path / "out.npy")) == 0
    found = np.load(tmp_path / "out.npy")
    assert (
        np.abs(found - megabert.load(model).encode(["dog", " dog"])).max() <= 1e-5 < np.abs(found[0] - found[1]).max()
    )


def test_causal_models_pool_their_last_token(run: Path) -> None:
    tokens, pooled = (Extractor(hf.load(run), pool=pool) for pool in ("none", "cls"))
    tokens.causal = pooled.causal = True
    texts = ["the quick fox", "the quick fox jumps over", "sea"]
    (part,), (last,) = tokens.windows(texts), pooled.windows(texts)
    ends = np.cumsum([len(ids) for ids in part.texts])
    np.testing.assert_allclose(last.vectors, part.vectors[ends - 1], atol=1e-6)
    # without [SEP]; what follows changes nothing
    shared = len(part.texts[0]) - 1
    np.testing.assert_allclose(part.vectors[:shared], part.vectors[ends[0] :][:shared], atol=1e-5)
    assert np.abs(part.vectors[shared] - part.vectors[ends[0] + shared]).max() > 0.01


def test_encode_keeps_the_number_of_threads(run: Path, two_threads: None) -> None:
    assert Extractor(hf.load(run), batch_tokens=30).encode(TEXTS).shape == (5, 32)
    assert torch.get_num_threads() == 2
    assert Extractor(hf.load(run)).encode([]).shape == (0, 32)


MISTAKES: list[tuple[str, bytes, list[str], str]] = [
    ("a.txt", b"one\n\ntwo\n", [], "a.txt, line 2: empty text"),
    ("a.txt", b"", [], "has no text in it"),
    ("a.tsv", b"x\ty\none\ttwo\n", [], "a.tsv: --text names the column of a .tsv"),
    ("a.tsv", b"x\ty\none\ttwo\n", ["--text", "z"], "no column 'z'; its columns are x, y"),
    ("a.csv", b"x,y\none, \n", ["--text", "y"], "line 2, column 'y': empty text"),
    ("a.txt", b"one\n", ["--layers", "5"], "the model has 0 (embeddings) to 4"),
    ("a.txt", b"one\n", ["--max-length", "101"], "the model takes 5 to 100 tokens"),
    ("a.txt", b"one\n", ["--output", "there.parquet"], "there.parquet: already exists"),
]  # fmt: skip


def test_a_mistake_is_one_line_and_no_file(run: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.parquet").write_bytes(b"kept")
    for name, data, more, message in MISTAKES:
        Path(name).write_bytes(data)
        assert message in refusal(capsys, features.main, *command(run, Path(name), Path("out.parquet")), *more)
        Path(name).unlink()
        assert [path.name for path in tmp_path.iterdir()] == ["there.parquet"]
    assert Path("there.parquet").read_bytes() == b"kept"


def peaks_of_features(world: World, model: str, folder: str) -> list[int]:
    """Most bytes of memory after the small file's vectors, and after the large one's."""
    peaks = []
    for name in ("small", "large"):
        given = command(Path(model), Path(folder, f"{name}.txt"), Path(folder, f"{name}.parquet"))
        assert features.main([*given, "--pool", "none", "--layers", "0,1,2,3,4", "--batch-tokens", "1024"]) == 0
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    return peaks


def test_a_file_that_shrinks_meanwhile_gives_no_vectors(
    run: Path, lines: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    """The header of an .npy has the number of texts at first."""
    read, counts = extraction.read_texts, iter((5, 4))
    monkeypatch.setattr(extraction, "read_texts", lambda path, column: islice(read(path, column), next(counts)))
    output = tmp_path / "vectors.npy"
    message = "lines.txt: had 5 texts and now has 4; it must not change meanwhile"
    assert message in refusal(capsys, features.main, *command(run, lines, output)) and not output.exists()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_input(run: Path, tmp_path: Path) -> None:
    """260 MB of vectors more, once all threads are busy, take less than 25 MB of memory more."""
    for name, times in (("small", 1200), ("large", 3600)):
        (tmp_path / f"{name}.txt").write_text("".join(f"{text}\n" for text in TEXTS * times))
    before, after = run_ranks(1, peaks_of_features, str(run), str(tmp_path))[0]
    assert (tmp_path / "large.parquet").stat().st_size > 300e6 and after - before < 25e6
