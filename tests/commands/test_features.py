"""Vectors are transformers' own, in the order of the input and whatever the batches; a mistake is one line and no file."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import transformers

from megabert import hf
from megabert.commands import export, features
from megabert.commands.extraction import Extractor, Layers, encode
from megabert.hf import sentence_folder
from megabert.hf.sentence_folder import Pooling
from tests.conftest import ROOT
from tests.helpers import runs

TEXTS = [
    "The quick brown fox jumps over the lazy dog near the river bank.",
    "sea shells",
    "A language model learns which words follow which, and how often they do so.",
    "She sells sea shells by the sea shore; the shells she sells are surely sea shells.",
    "dog",
]


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


def combined(states: list[np.ndarray], layers: str) -> np.ndarray:
    one, two, three, four = states[1:]
    return {
        "last": four,
        "second-to-last": three,
        "embeddings": states[0],
        "sum-last-4": one + two + three + four,
        "sum-all": one + two + three + four,
        "concat-last-4": np.concatenate([one, two, three, four], 1),
        "2": two,
        "4,0": np.concatenate([four, states[0]], 1),
    }[layers]


@pytest.mark.parametrize(
    "layers", ["last", "second-to-last", "embeddings", "concat-last-4", "2", "4,0", "sum-last-4", "sum-all"]
)
def test_layers_are_transformers_own(layers: str, run: Path, peer: Any, lines: Path) -> None:
    output = lines.with_suffix(".parquet")
    assert features.main(command(run, lines, output, "--pool", "none", "--layers", layers, "--batch-tokens", "30")) == 0
    found = tokens_of(output)
    want = [combined(peer(text), layers) for text in TEXTS]
    assert found["lengths"].tolist() == [len(states) for states in want]
    assert found["vectors"].dtype == np.float64 and found["vectors"].shape == np.concatenate(want).shape
    assert np.abs(found["vectors"] - np.concatenate(want)).max() <= 1e-5


@pytest.mark.parametrize("pool", ["cls", "mean", "max"])
@pytest.mark.parametrize("ending", [".npy", ".parquet"])
def test_pooled_is_a_vector_a_text(pool: str, ending: str, run: Path, peer: Any, lines: Path) -> None:
    output = lines.with_suffix(ending)
    assert features.main(command(run, lines, output, "--pool", pool)) == 0
    if ending == ".npy":
        found = np.load(output)
        assert found.dtype == np.float32
    else:
        table = pq.read_table(output)
        assert table.column_names == ["vector", "truncated"] and table["vector"].type.list_size == 32
        found = np.array(table["vector"].to_pylist())
    of = {"cls": lambda x: x[0], "mean": lambda x: x.mean(0), "max": lambda x: x.max(0)}[pool]
    want = np.stack([of(peer(text)[-1]) for text in TEXTS])
    assert found.shape == (5, 32) and np.abs(found - want).max() <= 1e-5


def test_a_part_of_one_text_holds_its_tokens(run: Path, peer: Any, lines: Path) -> None:
    """Two tokens a batch, so that a part has a text or two; texts above 30 tokens are cut."""
    output = lines.with_suffix(".parquet")
    options = ["--pool", "none", "--batch-tokens", "2", "--dtype", "float16", "--max-length", "30"]
    assert features.main(command(run, lines, output, *options)) == 0
    lengths = [len(peer(text)[0]) for text in TEXTS]
    found = tokens_of(output)
    assert found["lengths"].tolist() == [min(n, 30) for n in lengths]
    ends = found["lengths"].cumsum()
    for i in (1, 4):
        of_text = slice(ends[i] - lengths[i], ends[i])
        assert np.abs(found["vectors"][of_text] - peer(TEXTS[i])[-1]).max() <= 4e-3
    table, tokenizer = pq.read_table(output), hf.load(run).tokenizer
    assert table["truncated"].to_pylist() == [n > 30 for n in lengths] == [True, False, True, True, False]
    ids = [tokenizer.cls_id, *tokenizer.encode_batch([TEXTS[1]])[0], tokenizer.sep_id]
    assert table["ids"][1].as_py() == ids and table["tokens"][1].as_py() == [tokenizer.tokens[i] for i in ids]
    about = json.loads(table.schema.metadata[b"about"])
    assert about["layers"] == "last" and about["pool"] == "none" and about["tokenizer_sha256"] == tokenizer.sha256
    assert pq.ParquetFile(output).metadata.num_row_groups > 1
    assert sorted(path.name for path in output.parent.iterdir()) == sorted([lines.name, output.name])


@pytest.mark.parametrize("ending", [".tsv", ".csv.gz", ".jsonl"])
def test_pairs_of_a_table_are_transformers_own(ending: str, run: Path, peer: Any, tmp_path: Path) -> None:
    pairs = [("the fox", "the lazy dog, she sells"), ('a "quick" fox', "sea")]
    path, output = tmp_path / f"pairs{ending}", tmp_path / "out.npy"
    rows = {
        ".tsv": "b\tn\ta\n" + "".join(f"{b}\t1\t{a}\n" for a, b in pairs),
        ".csv": 'b,a\r\n"the lazy dog, she sells",the fox\r\nsea,"a ""quick"" fox"\r\n',
        ".jsonl": "".join(json.dumps({"a": a, "b": b, "n": 1}) + "\n" for a, b in pairs),
    }
    data = rows[ending.removesuffix(".gz")].encode()
    path.write_bytes(gzip.compress(data) if ending.endswith(".gz") else data)
    assert features.main(command(run, path, output, "--text", "a", "--text", "b", "--pool", "mean")) == 0
    want = np.stack([peer(*pair)[-1].mean(0) for pair in pairs])
    assert np.abs(np.load(output) - want).max() <= 1e-5


def test_a_pair_is_cut_as_bert_cuts_it(run: Path) -> None:
    """`_truncate_seq_pair` of Devlin et al.'s release: the last token of the longer part goes, of B when they are equal."""
    pretrained = hf.load(run)
    cls, sep = pretrained.tokenizer.cls_id, pretrained.tokenizer.sep_id
    texts = ["sea", "dog near", "sea shells sea", *TEXTS]
    pairs = [(a, b) for a in texts for b in texts]
    cut = 0
    for length in (17, 18):
        for (a, b), text in zip(pairs, Extractor(pretrained, max_length=length).tokenize(pairs), strict=True):
            first, second = pretrained.tokenizer.encode_batch([a, b])
            before = len(first) + len(second)
            while len(first) + len(second) > length - 3:
                (first if len(first) > len(second) else second).pop()
            assert text.ids.tolist() == [cls, *first, sep, *second, sep]
            assert text.second == len(first) + 2 and text.truncated == (before > length - 3)
            cut += text.truncated
    assert 50 < cut < 120


def test_a_hugging_face_folder_gives_the_same(run: Path, lines: Path, capsys) -> None:
    outputs = [lines.with_name(f"{name}.npy") for name in ("run", "hf")]
    for model, output in zip((run, run.with_name("hf")), outputs, strict=True):
        assert features.main(command(model, lines, output, "--pool", "mean", "--max-length", "30")) == 0
        captured = capsys.readouterr()
        assert captured.out == f"{output}: vectors of 5 texts\n"
        assert "warning: 3 of them are longer than 30 tokens and lost their end" in captured.err
    assert outputs[0].read_bytes() == outputs[1].read_bytes()


def test_causal_models_pool_their_last_token(run: Path) -> None:
    tokens, pooled = (Extractor(hf.load(run), pool=pool) for pool in ("none", "cls"))
    tokens.causal = pooled.causal = True
    texts = [(text, None) for text in ("the quick fox", "the quick fox jumps over", "sea")]
    (part,), (last,) = tokens.parts(texts), pooled.parts(texts)
    ends = part.lengths.cumsum()
    np.testing.assert_allclose(last.vectors, part.vectors[ends - 1], atol=1e-6)
    # without [SEP]; what follows changes nothing
    shared = part.lengths[0] - 1
    np.testing.assert_allclose(part.vectors[:shared], part.vectors[ends[0] :][:shared], atol=1e-5)
    assert np.abs(part.vectors[shared] - part.vectors[ends[0] + shared]).max() > 0.01


def test_encode_gives_unit_vectors_and_keeps_threads(run: Path, peer: Any) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = encode(hf.load(run), TEXTS, normalise=True, batch_tokens=30)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    want = np.stack([peer(text)[-1].mean(0) for text in TEXTS])
    assert np.abs(found - want / np.linalg.norm(want, axis=1, keepdims=True)).max() <= 1e-5
    assert encode(hf.load(run), []).shape == (0, 32)


def test_pool_sentence_is_as_the_folder_says(run: Path, lines: Path, tmp_path: Path) -> None:
    sentence_folder.write(tmp_path / "model", hf.load(run), {}, Pooling("mean", 24), "card\n")
    output = lines.with_suffix(".npy")
    assert features.main(command(tmp_path / "model", lines, output, "--pool", "sentence")) == 0
    found = encode(hf.load(run), TEXTS, normalise=True, max_length=24)
    assert np.abs(np.load(output) - found).max() <= 1e-6
    arguments = command(tmp_path / "model", lines, tmp_path / "no.npy", "--pool", "sentence", "--layers", "2")
    assert features.main(arguments) == 2 and not (tmp_path / "no.npy").exists()


def test_bf16_is_near_fp32(run: Path, peer: Any, lines: Path) -> None:
    output = lines.with_suffix(".npy")
    assert features.main(command(run, lines, output, "--pool", "mean", "--precision", "bf16")) == 0
    want = np.stack([peer(text)[-1].mean(0) for text in TEXTS])
    assert 1e-5 < np.abs(np.load(output) - want).max() < 3e-2


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1 and not captured.out
    return captured.err


MISTAKES: list[tuple[str, bytes, list[str], str]] = [
    ("a.txt", b"one\n\ntwo\n", [], "a.txt, line 2: empty text"),
    ("a.txt", b"", [], "has no text in it"),
    ("a.txt", b"one\ncaf\xe9\n", [], "a.txt, line 2: is not UTF-8"),
    ("a.txt", b"one\n", ["--text", "a"], "columns are of files that end in .tsv"),
    ("a.tsv", b"x\ty\none\ttwo\n", [], "is a table; name the column"),
    ("a.tsv", b"x\ty\none\ttwo\n", ["--text", "z"], "no column 'z'; its columns are x, y"),
    ("a.csv", b"x,y\none, \n", ["--text", "y"], "line 2, column 'y': empty text"),
    ("a.txt.gz", gzip.compress(b"one\n" * 99, mtime=0)[:-9], [], "is not a whole gzip file after line"),
    ("a.txt", b"one\n", ["--layers", "5"], "the model has 0 (embeddings) to 4"),
    ("a.txt", b"one\n", ["--layers", "first"], "--layers first: is none of last, second-to-last"),
    ("a.txt", b"one\n", ["--max-length", "101"], "the model takes 5 to 100 tokens"),
    ("a.txt", b"one\n", ["--batch-tokens", "0"], "must be 1 or more"),
    ("a.txt", b"one\n", ["--text", "a", "--text", "b", "--text", "c"], "--text c: a pair has two texts"),
    ("a.txt", b"one\n", ["--output", "OUT.txt"], "OUT.txt: must end in .parquet, .npy"),
    ("a.txt", b"one\n", ["--output", "out.npy", "--pool", "none"], "out.npy: .npy holds one vector a text"),
    ("a.txt", b"one\n", ["--output", "none/out.parquet"], "none: no such folder"),
    ("a.txt", b"one\n", ["--output", "there.parquet"], "there.parquet: is there already"),
    ("a.txt", b"one\n", ["--input", "none.txt"], "none.txt: no such file"),
    ("a.txt", b"one\n", ["--model", "."], "it is no run folder"),
    ("a.txt", b"one\n", ["--pool", "sentence"], "has no modules.json"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "data", "more", "message"), MISTAKES)
def test_a_mistake_is_one_line_and_no_file(
    name: str, data: bytes, more: list[str], message: str, run: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(data)
    Path("there.parquet").write_bytes(b"kept")
    assert features.main([*command(run, Path(name), Path("out.parquet")), *more]) == 2
    assert message in one_line(capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "there.parquet"])
    assert Path("there.parquet").read_bytes() == b"kept"


def test_an_overflow_of_float16_is_refused(run: Path, lines: Path, capsys, monkeypatch) -> None:
    vectors = Extractor._vectors
    monkeypatch.setattr(Extractor, "_vectors", lambda self, texts: vectors(self, texts) * np.float32(1e6))
    assert features.main(command(run, lines, lines.with_suffix(".parquet"), "--dtype", "float16")) == 2
    assert "not finite in float16" in one_line(capsys)


def test_four_layers_need_four_layers() -> None:
    for layers in ("sum-last-4", "concat-last-4"):
        with pytest.raises(ValueError, match="the model has 3 layers"):
            Layers.parse(layers, 3)
    assert Layers.parse("sum-all", 3) == Layers((1, 2, 3), summed=True)


@pytest.mark.parametrize(("pool", "ending"), [("none", ".parquet"), ("mean", ".npy")])
def test_an_interrupted_extraction_resumes_to_the_same_bytes(
    pool: str, ending: str, run: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    """Of 40 texts in parts of 16 tokens or one text, interrupted three times, first before anything was computed; no text
    is computed again whose part was whole."""
    lines, computed, limit = tmp_path / "lines.txt", 0, 10**9
    lines.write_text("".join(f"{text}\n" for text in TEXTS * 8))
    compute = Extractor._compute

    def counted(self: Extractor, job: Any) -> Any:
        nonlocal computed
        computed += len(job[1])
        if computed > limit:
            raise KeyboardInterrupt
        return compute(self, job)

    monkeypatch.setattr(Extractor, "_compute", counted)
    whole, output = tmp_path / f"whole{ending}", tmp_path / f"output{ending}"
    options = ["--pool", pool, "--batch-tokens", "2"]
    assert features.main(command(run, lines, whole, *options)) == 0
    assert computed == 40
    capsys.readouterr()
    for limit in (0, 16, 14, 10**9):
        computed = 0
        assert features.main(command(run, lines, output, *options)) == (130 if limit < 40 else 0)
        assert output.exists() == (limit == 10**9)
        if limit == 0:
            assert one_line(capsys) == "error: interrupted; nothing was written\n"
            assert {path.name for path in tmp_path.iterdir()} == {lines.name, whole.name}
    assert computed <= 20 and output.read_bytes() == whole.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {lines.name, whole.name, output.name}


@pytest.mark.slow
def test_a_killed_extraction_resumes_to_the_same_bytes(run: Path, tmp_path: Path) -> None:
    """SIGKILL once a state is on the disk, while more is written."""
    (tmp_path / "lines.txt").write_text("".join(f"{text} {n}\n" for n in range(8_000) for text in TEXTS))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def start(output: str) -> subprocess.Popen[str]:
        argv = command(run, tmp_path / "lines.txt", tmp_path / output, "--pool", "mean", "--batch-tokens", "256")
        program = [sys.executable, "-m", "megabert.commands.features", *argv]
        return subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, text=True)

    process, progress = start("killed.npy"), tmp_path / ".killed.npy.partial" / "progress.json"
    while not progress.exists():
        assert process.poll() is None, "finished before its first state; give it more texts"
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert not (tmp_path / "killed.npy").exists()
    for name in ("killed.npy", "whole.npy"):
        process = start(name)
        printed = process.communicate()[0]
        assert process.returncode == 0 and ("resumes after" in printed) == (name == "killed.npy")
    assert (tmp_path / "killed.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()
    assert len(np.load(tmp_path / "whole.npy")) == 40_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed.npy", "lines.txt", "whole.npy"]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_input(run: Path, tmp_path: Path) -> None:
    """260 MB of vectors more, once all threads are busy, take less than 25 MB of memory more."""
    program = (
        "import resource, sys\nfrom megabert.commands.features import main\n"
        "for name in ('small', 'large'):\n"
        "    assert main([*sys.argv[1:], '--input', f'{name}.txt', '--output', f'{name}.parquet']) == 0\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    for name, times in (("small", 1200), ("large", 3600)):
        (tmp_path / f"{name}.txt").write_text("".join(f"{text}\n" for text in TEXTS * times))
    args = ["--model", str(run), "--pool", "none", "--layers", "0,1,2,3,4", "--batch-tokens", "1024"]
    done = subprocess.run(
        [sys.executable, "-c", program, *args],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    before, after = (int(line) * 1024 for line in done.stdout.split("\n") if line.isdecimal())
    assert (tmp_path / "large.parquet").stat().st_size > 300e6 and after - before < 25e6
