"""fastText models as filters: what the model says decides, mistakes are named."""

import json
import random
from pathlib import Path

import pytest

from data_prep.__main__ import main
from data_prep.common.errors import BadInput
from data_prep.filters.classifiers import Classifier
from megabert.data.tokenizer import Tokenizer
from tests.helpers import fasttext_model

pytest.importorskip("fasttext", reason="fasttext-predict is not installed")
OLD = Path(__file__).resolve().parents[2] / "data" / "golden"
TEXTS = {
    "en": "the house stands on a hill and it was good to see how many of them came",
    "de": "das Haus steht auf einem Berg und es war gut zu sehen wie viele kamen",
}


def text(language, rng, words=40):
    return " ".join(rng.choices(TEXTS[language].split(), k=words)) + "."


@pytest.fixture
def model(tmp_path):
    rng = random.Random(1)
    return str(fasttext_model.write(tmp_path / "lid.bin", {name: [text(name, rng, 400)] for name in TEXTS}))


def test_documents_are_kept_by_label_probability(model):
    rng = random.Random(2)
    english, german = text("en", rng), text("de", rng)
    one, both = Classifier(model, ("en",), 0.65), Classifier(model, ("en", "de"), 0.65)
    assert one.keeps(english) and not one.keeps(german) and both.keeps(english) and both.keeps(german)
    mixed = TEXTS["en"][:38] + TEXTS["de"][:38]
    assert not Classifier(model, ("en",), 0.999).keeps(mixed) and Classifier(model, ("en",), 0.0).keeps(mixed)
    assert not one.keeps("") and not one.keeps("\n\n")  # has no evidence
    assert one.keeps(english.replace(" ", "\n")) and one.keeps(text("en", rng, 4000)[:10_000] + german * 900)


def test_mistakes_are_named(model, tmp_path):
    (tmp_path / "no.bin").write_bytes(b"no model")
    for classifier, message in (
        (Classifier(str(tmp_path / "gone.bin"), ("en",), 0.5), "gone.bin: no such model file"),
        (Classifier(str(tmp_path / "no.bin"), ("en",), 0.5), "no.bin: not a fastText model"),
    ):
        with pytest.raises(BadInput, match=message):
            classifier.check()
    for text in ("model", "model:en", "model:en:x", "model:en:1.5", "model::0.5", "model:a,,b:0.5"):
        with pytest.raises(BadInput, match=f"--classifier {text}: give FILE:LABELS:P"):
            Classifier.parse(text)


def test_build_drops_by_each_model(model, tmp_path):
    rng = random.Random(3)
    lines = [text("en" if i % 2 else "de", rng) for i in range(60)]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    options = [
        "--text-documents", "line", "--seq-len", "32", "--held-out", "0", "--workers", "1", "--quiet",
        "--tokenizer", f"{OLD}/dataset/tokenizer.model", "--classifier", f"{model}:en,de:0.1", f"{model}:en:0.65",
    ]  # fmt: skip
    for _ in range(2):
        assert main(["build", "--input", f"{tmp_path}/a.txt", "--output", f"{tmp_path}/out", *options]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["dropped"]["reasons"] == {"classifier lid.bin": 30}
    keep = tmp_path / "keep.py"
    keep.write_text("def keep(text): return 'house' in text")
    for chosen in (["--classifier", f"{model}:en:0.65"], ["--filters", f"{keep}:keep"]):
        trained = [
            "--vocab-size",
            "36",
            "--character-coverage",
            "1",
            *options[: options.index("--tokenizer")],
            *chosen,
            "--overwrite",
        ]
        assert main(["build", "--input", f"{tmp_path}/a.txt", "--output", f"{tmp_path}/new", *trained]) == 0
        tokens = Tokenizer.load(tmp_path / "new" / "tokenizer.model").tokens[5:]
        assert any("h" in token for token in tokens) and not any("k" in token for token in tokens)  # kamen
    assert report["corpora"]["input"]["dropped_while_reading"] == {"classifier lid.bin": 30}
    assert str(model) in json.loads((tmp_path / "out" / "build.json").read_text())["options"]["digests"]


@pytest.mark.parametrize("tokenizer", [("--tokenizer", f"{OLD}/dataset/tokenizer.model"), ("--vocab-size", "36")])
def test_classifiers_see_cleaned_text_without_dropped_lines(tokenizer, model, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(Classifier, "keeps", lambda self, text: seen.append(text) or True)
    line = "The \xad&quot;house&quot; stands on a hill, and it was good to see how many of them came."
    (tmp_path / "a.txt").write_text(f"Home | Contact\n{line}\n\n\n" * 9, encoding="utf-8")
    arguments = [
        "build", "--input", f"{tmp_path}/a.txt", "--output", f"{tmp_path}/out", "--text-documents", "blank-line", "--seq-len", "32",
        "--held-out", "0", "--dedup", "none", "--workers", "1", "--quiet", "--classifier", f"{model}:en:0.5", "--filters",
        "min-line-words=5", *tokenizer,
    ]  # fmt: skip
    assert main(arguments) == 0
    assert set(seen) == {line.replace("\xad", "")} and len(seen) == 9 * (1 + ("--vocab-size" in tokenizer))
