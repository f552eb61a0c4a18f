"""Vectors are transformers' own, in the order of the input and whatever the batches; a mistake is one line and no file."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from safetensors import safe_open

from megabert import hf as pretrained
from megabert.commands import export
from megabert.commands.features import __main__ as features
from megabert.commands.features.compare import uses_of
from megabert.commands.features.extraction import Extractor, Layers, encode
from tests.helpers import runs

TEXTS = [
    "The quick brown fox jumps over the lazy dog near the river bank.",
    "sea shells",
    "A language model learns which words follow which, and how often they do so.",
    "She sells sea shells by the sea shore; the shells she sells are surely sea shells.",
    "dog",
]
SUMS = ("sum-last-4", "sum-all", "weighted:0.5,-1,2,0,0.25")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 layers of 32, and its export beside it, `hf`."""
    folder = runs.make(tmp_path_factory.mktemp("model") / "run", "uncased", layers=4, max_positions=100)
    export.export(folder, folder.with_name("hf"))
    return folder


@pytest.fixture(scope="module")
def states(run: Path) -> list[list[np.ndarray]]:
    """transformers' five hidden states [tokens, 32] of each text, with [CLS] and [SEP]."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.with_name("hf"))
    peer = transformers.BertModel.from_pretrained(run.with_name("hf")).eval()
    found = []
    for text in TEXTS:
        with torch.no_grad():
            out = peer(**tokenizer(text, return_tensors="pt"), output_hidden_states=True)
        found.append([state[0].numpy() for state in out.hidden_states])
    return found


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    (tmp_path / "lines.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    return tmp_path / "lines.txt"


def command(model: Path, input: Path, output: Path, *more: str) -> list[str]:
    return ["--model", str(model), "--input", str(input), "--output", str(output), *more]


def wanted(states: list[np.ndarray], layers: str) -> np.ndarray:
    one, two, three, four = states[1:]
    found = {
        "last": four,
        "second-to-last": three,
        "embeddings": states[0],
        "sum-last-4": one + two + three + four,
        "sum-all": one + two + three + four,
        "concat-last-4": np.concatenate([one, two, three, four], 1),
        "2": two,
        "4,0": np.concatenate([four, states[0]], 1),
        "weighted:0.5,-1,2,0,0.25": 0.5 * states[0] - one + 2 * two + 0.25 * four,
    }
    return found[layers]


@pytest.mark.parametrize("layers", ["last", "second-to-last", "embeddings", "concat-last-4", "2", "4,0", *SUMS])
def test_layers_are_transformers_own(layers: str, run: Path, states: Any, lines: Path) -> None:
    output = lines.with_suffix(".npz")
    assert features.main(command(run, lines, output, "--layers", layers, "--batch-tokens", "30")) == 0
    found = np.load(output)
    want = np.concatenate([wanted(of, layers) for of in states])
    assert found["vectors"].dtype == np.float32 and found["vectors"].shape == want.shape
    assert np.abs(found["vectors"] - want).max() <= 1e-5
    assert np.diff(found["offsets"]).tolist() == [len(of[0]) for of in states]


@pytest.mark.parametrize("pool", ["cls", "mean", "max"])
def test_pooled_is_a_vector_a_text(pool: str, run: Path, states: Any, lines: Path) -> None:
    output = lines.with_suffix(".npz")
    assert features.main(command(run, lines, output, "--pool", pool)) == 0
    found = np.load(output)
    of = {"cls": lambda x: x[0], "mean": lambda x: x.mean(0), "max": lambda x: x.max(0)}[pool]
    want = np.stack([of(state[-1]) for state in states])
    assert found["vectors"].shape == (5, 32) and np.abs(found["vectors"] - want).max() <= 1e-5
    assert set(found.files) == {"vectors", "truncated", "about"} and not found["truncated"].any()


def read(path: Path) -> dict[str, Any]:
    """An output file of tokens as arrays, whatever its ending."""
    if path.suffix == ".npz":
        return dict(np.load(path))
    if path.suffix == ".safetensors":
        with safe_open(path, "np") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return found | {"about": file.metadata()["about"], "pieces": json.loads(file.metadata()["pieces"])}
    table = pq.read_table(path)
    lists = {name: table[name].to_pylist() for name in ("ids", "vectors", "truncated", "pieces")}
    offsets = np.cumsum([0, *map(len, lists["ids"])])
    joined = {name: np.concatenate([np.array(row) for row in lists[name]]) for name in ("ids", "vectors")}
    assert [len(row) for row in lists["pieces"]] == [len(row) for row in lists["ids"]]
    about = table.schema.metadata[b"about"].decode()
    return joined | {"offsets": offsets, "truncated": np.array(lists["truncated"]), "about": about}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("ending", [".npz", ".parquet", ".safetensors"])
def test_every_format_holds_the_same_in_many_parts(
    ending: str, dtype: str, run: Path, states: Any, lines: Path
) -> None:
    """Two tokens a batch, so that a part has a text or two."""
    output = lines.with_suffix(ending)
    options = ["--batch-tokens", "2", "--dtype", dtype, "--max-length", "30"]
    assert features.main(command(run, lines, output, *options)) == 0
    found = read(output)
    lengths = [len(of[0]) for of in states]
    assert found["offsets"].tolist() == np.cumsum([0, *(min(n, 30) for n in lengths)]).tolist()
    assert found["truncated"].tolist() == [n > 30 for n in lengths] == [True, False, True, True, False]
    tolerance = 1e-5 if dtype == "float32" else 4e-3
    for i in (1, 4):
        own = slice(found["offsets"][i], found["offsets"][i + 1])
        assert np.abs(found["vectors"][own] - states[i][-1]).max() <= tolerance
    about = json.loads(str(found["about"]))
    assert about["layers"] == "last" and about["pool"] == "none" and about["step"] == 0
    tokenizer = pretrained.load(run).tokenizer
    assert about["tokenizer_sha256"] == tokenizer.sha256
    ids = [tokenizer.cls_id, *tokenizer.encode_batch([TEXTS[1]])[0], tokenizer.sep_id]
    assert found["ids"][found["offsets"][1] : found["offsets"][2]].tolist() == ids
    if "pieces" in found:
        assert [found["pieces"][i] for i in ids] == [tokenizer.pieces[i] for i in ids]
    if ending == ".parquet":
        assert pq.ParquetFile(output).metadata.num_row_groups > 1
        assert pq.read_table(output)["pieces"][1].as_py() == [tokenizer.pieces[i] for i in ids]
    elif ending == ".npz":
        assert found["vectors"].dtype == np.dtype(dtype)
    assert sorted(path.name for path in output.parent.iterdir()) == sorted([lines.name, output.name])


def test_pooled_vectors_are_a_column_of_parquet(run: Path, states: Any, lines: Path) -> None:
    output = lines.with_suffix(".parquet")
    assert features.main(command(run, lines, output, "--pool", "mean")) == 0
    table = pq.read_table(output)
    assert table.column_names == ["vector", "truncated"] and table["vector"].type.list_size == 32
    want = np.stack([state[-1].mean(0) for state in states])
    assert np.abs(np.array(table["vector"].to_pylist()) - want).max() <= 1e-5


@pytest.mark.parametrize("ending", [".tsv", ".csv", ".jsonl", ".tsv.gz"])
def test_pairs_of_a_table_are_transformers_own(ending: str, run: Path, tmp_path: Path) -> None:
    pairs = [("the fox", "the lazy dog, she sells"), ('a "quick" fox', "sea")]
    path, output = tmp_path / f"pairs{ending}", tmp_path / "out.npz"
    rows = {
        ".tsv": "b\tn\ta\n" + "".join(f"{b}\t1\t{a}\n" for a, b in pairs),
        ".csv": 'b,a\r\n"the lazy dog, she sells",the fox\r\nsea,"a ""quick"" fox"\r\n',
        ".jsonl": "".join(json.dumps({"a": a, "b": b, "n": 1}) + "\n" for a, b in pairs),
    }
    data = rows[ending.removesuffix(".gz")].encode()
    path.write_bytes(gzip.compress(data) if ending.endswith(".gz") else data)
    assert features.main(command(run, path, output, "--text", "a", "--text", "b")) == 0
    found = np.load(output)
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.with_name("hf"))
    peer = transformers.BertModel.from_pretrained(run.with_name("hf")).eval()
    with torch.no_grad():
        want = [peer(**tokenizer(a, b, return_tensors="pt")).last_hidden_state[0].numpy() for a, b in pairs]
    assert np.abs(found["vectors"] - np.concatenate(want)).max() <= 1e-5


def test_a_pair_is_cut_as_bert_cuts_it(run: Path) -> None:
    """`_truncate_seq_pair` of Devlin et al.'s release: the last piece of the longer part goes, of B when they are equal."""
    found = pretrained.load(run)
    cls, sep = found.tokenizer.cls_id, found.tokenizer.sep_id
    texts = ["sea", "dog near", "sea shells sea", *TEXTS]
    pairs = [(a, b) for a in texts for b in texts]
    cut = 0
    for length in (17, 18):
        for (a, b), item in zip(pairs, Extractor(found, max_length=length).items(pairs), strict=True):
            first, second = found.tokenizer.encode_batch([a, b])
            before = len(first) + len(second)
            while len(first) + len(second) > length - 3:
                (first if len(first) > len(second) else second).pop()
            assert item.ids.tolist() == [cls, *first, sep, *second, sep]
            assert item.second == len(first) + 2 and item.truncated == (before > length - 3)
            cut += item.truncated
    assert 50 < cut < 120


def test_texts_that_were_cut_are_counted(run: Path, lines: Path, capsys) -> None:
    output = lines.with_suffix(".npz")
    assert features.main(command(run, lines, output, "--max-length", "30", "--pool", "cls")) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{output}: vectors of 5 texts\n"
    assert "warning: 3 of them are longer than 30 tokens and lost their end" in captured.err
    assert np.load(output)["truncated"].tolist() == [True, False, True, True, False]


def test_a_hugging_face_folder_gives_the_same(run: Path, lines: Path) -> None:
    outputs = [lines.with_name(f"{name}.npz") for name in ("run", "hf")]
    for model, output in zip((run, run.with_name("hf")), outputs, strict=True):
        assert features.main(command(model, lines, output, "--pool", "mean")) == 0
    a, b = (np.load(output)["vectors"] for output in outputs)
    assert a.tobytes() == b.tobytes()


def test_a_left_to_right_model_reads_a_text_at_its_last_token(run: Path) -> None:
    tokens, pooled = (Extractor(pretrained.load(run), pool=pool) for pool in ("none", "cls"))
    tokens.causal = pooled.causal = True
    texts = [(text, None) for text in ("the quick fox", "the quick fox jumps over", "sea")]
    (part,), (last,) = tokens.parts(texts), pooled.parts(texts)
    ends = part.lengths.cumsum()
    np.testing.assert_allclose(last.vectors, part.vectors[ends - 1], atol=1e-6)
    shared = part.lengths[0] - 1  # without [SEP]; what follows changes nothing
    np.testing.assert_allclose(part.vectors[:shared], part.vectors[ends[0] :][:shared], atol=1e-5)
    assert np.abs(part.vectors[shared] - part.vectors[ends[0] + shared]).max() > 0.01


def test_an_interrupted_extraction_leaves_nothing(run: Path, lines: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    def compute(self: Extractor, job: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Extractor, "_compute", compute)
    assert features.main(command(run, lines, tmp_path / "v.npz")) == 130
    assert one_line(capsys) == "error: interrupted; nothing was written\n"
    assert list(tmp_path.iterdir()) == [lines]


def test_encode_gives_a_vector_a_text_in_their_order(run: Path, states: Any) -> None:
    found = encode(pretrained.load(run), TEXTS, normalise=True, batch_tokens=30)
    want = np.stack([state[-1].mean(0) for state in states])
    assert np.abs(found - want / np.linalg.norm(want, axis=1, keepdims=True)).max() <= 1e-5
    assert encode(pretrained.load(run), []).shape == (0, 32)


def test_bf16_is_near_fp32(run: Path, states: Any, lines: Path) -> None:
    output = lines.with_suffix(".npz")
    assert features.main(command(run, lines, output, "--pool", "mean", "--precision", "bf16")) == 0
    want = np.stack([state[-1].mean(0) for state in states])
    off = np.abs(np.load(output)["vectors"] - want).max()
    assert 1e-5 < off < 3e-2


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
    ("a.tsv", b"x\ty\none\ttwo\nthree\n", ["--text", "x"], "line 3: has 1 columns, the header has 2"),
    ("a.csv", b"x,y\none, \n", ["--text", "y"], "line 2, column 'y': empty text"),
    ("a.csv", b'x,y\n"one,' + b"a" * 17_000_000 + b'",b\n', ["--text", "y"], "field larger than field limit"),
    ("a.jsonl", b'{"x": "one"}\n{"x": 3}\n', ["--text", "x"], "line 2, column 'x': is no text but 3"),
    ("a.jsonl", b'{"x": "one"}\n["x"]\n', ["--text", "x"], "line 2: is no JSON object"),
    ("a.jsonl", b'{"x": "\\ud800"}\n', ["--text", "x"], "a.jsonl, line 1: holds '\\ud800', half a character"),
    ("a.txt.gz", b"no gzip", [], "is not a whole gzip file behind line 0"),
    ("a.txt.gz", gzip.compress(b"one\n" * 99, mtime=0)[:-9], [], "is not a whole gzip file behind line"),
    ("a.txt", b"one\n", ["--layers", "5"], "the model has 0 (embeddings) to 4"),
    ("a.txt", b"one\n", ["--layers", "-1"], "the model has 0 (embeddings) to 4"),
    ("a.txt", b"one\n", ["--layers", "first"], "--layers first: is none of last, second-to-last"),
    ("a.txt", b"one\n", ["--layers", "weighted:1,2"], "2 weights, but the embeddings and 4 layers take 5"),
    ("a.txt", b"one\n", ["--layers", "weighted:1,2,3,4,nan"], "is none of"),
    ("a.txt", b"one\n", ["--max-length", "101"], "the model takes 5 to 100 tokens"),
    ("a.txt", b"one\n", ["--batch-tokens", "0"], "must be 1 or more"),
    ("a.txt", b"one\n", ["--text", "a", "--text", "b", "--text", "c"], "--text c: a pair has two texts"),
    ("a.txt", b"one\n", ["--output", "OUT.txt"], "OUT.txt: must end in .npz, .parquet, .safetensors"),
    ("a.txt", b"one\n", ["--output", "none/out.npz"], "none: no such folder"),
    ("a.txt", b"one\n", ["--output", "a.txt/out.npz"], "a.txt: no such folder"),
    ("a.txt", b"one\n", ["--output", "there.npz"], "there.npz: is there already"),
    ("a.txt", b"one\n", ["--input", "none.txt"], "none.txt: no such file"),
    ("a.txt", b"one\n", ["--model", "none"], "none: no such folder"),
    ("a.txt", b"one\n", ["--model", "."], "it is no run folder"),
    ("a.txt", b"one\n", ["--dtype", "float16", "--layers", "weighted:0,0,0,0,9e9"], "not finite in float16"),
    ("a.txt", b"one\n", ["--compare", "one"], "takes texts, and no --input"),
    ("a.txt", b"one\n", ["a text"], "give --input FILE and --output FILE, or --compare"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "data", "more", "said"), MISTAKES)
def test_a_mistake_is_one_line_and_no_file(
    name: str, data: bytes, more: list[str], said: str, run: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(data)
    Path("there.npz").write_bytes(b"kept")
    assert features.main([*command(run, Path(name), Path("out.npz")), *more]) == 2
    assert said in one_line(capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "there.npz"])
    assert Path("there.npz").read_bytes() == b"kept"


def test_four_layers_are_asked_of_models_that_have_them() -> None:
    for layers in ("sum-last-4", "concat-last-4"):
        with pytest.raises(ValueError, match="the model has 3 layers"):
            Layers.parse(layers, 3)
    assert Layers.parse("sum-all", 3) == Layers((1, 2, 3), (1.0, 1.0, 1.0))


@pytest.mark.parametrize("kind", runs.KINDS)
def test_a_word_has_a_vector_a_context_and_one_in_the_table(kind: str, tmp_path: Path) -> None:
    extractor = Extractor(pretrained.load(runs.make(tmp_path / "run", kind)))
    texts = ["the shells she sells", "a fox near shells, shells"]
    uses = uses_of("shells", texts, extractor)
    assert [use.text for use in uses] == [texts[0], texts[1], texts[1]]
    tokenizer = extractor.found.tokenizer
    (item,) = extractor.items([(texts[0], None)])
    count = len(tokenizer.encode_batch(["the shells"])[0]) - len(tokenizer.encode_batch(["the"])[0])
    at = slice(1 + len(tokenizer.encode_batch(["the"])[0]), None)
    own = item.ids[at][:count]
    np.testing.assert_allclose(uses[0].contextual, extractor.part([item]).vectors[at][:count].mean(0), atol=1e-6)
    table = extractor.found.weights["embeddings.word.weight"].numpy()
    np.testing.assert_allclose(uses[0].static, table[own].mean(0), atol=1e-6)
    assert uses[0].static.tolist() == uses[1].static.tolist() == uses[2].static.tolist()
    assert np.abs(uses[0].contextual - uses[1].contextual).max() > 0.01


def test_a_comparison_is_a_table_of_cosines(run: Path, capsys) -> None:
    args = ["--model", str(run), "--compare", "Fox", "the quick fox", "a lazy fox jumps"]
    assert features.main(args) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["  1  the quick fox", "  2  a lazy fox jumps"]
    assert lines[3] == "cosines between the vectors of 'Fox' in context (layers: last)"
    one, two = (line.split() for line in lines[5:7])
    assert one[:2] == ["1", "1.000"] and two[::2] == ["2", "1.000"] and one[2] == two[1] != "1.000"
    assert lines[8:] == ["smallest cosine between its vectors in the static table of word embeddings: 1.000"]
    assert features.main([*args, "no animal"]) == 2
    assert "--compare Fox: the word is not in 'no animal'" in one_line(capsys)
    assert features.main([*args, "fox " * 100]) == 2
    assert "has more than 100 tokens" in one_line(capsys)
    assert features.main([*args, "--input", "x"]) == 2
    assert "takes texts, and no --input" in one_line(capsys)
