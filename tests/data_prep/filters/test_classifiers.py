"""fastText models as filters: what the model says decides, a corpus may want another language, mistakes are named."""

import json
import random
from pathlib import Path

import pytest

from data_prep.__main__ import main
from data_prep.common.errors import BadInput
from data_prep.filters.classifiers import Classifier
from tests.helpers import fasttext_model

pytest.importorskip("fasttext", reason="fasttext-predict is not installed")
OLD = Path(__file__).resolve().parents[2] / "data" / "golden"
WORDS = {
    "en": [
        "the",
        "house",
        "stands",
        "on",
        "a",
        "hill",
        "and",
        "it",
        "was",
        "good",
        "to",
        "see",
        "how",
        "many",
        "of",
        "them",
        "came",
    ],
    "de": [
        "das",
        "Haus",
        "steht",
        "auf",
        "einem",
        "Berg",
        "und",
        "es",
        "war",
        "gut",
        "zu",
        "sehen",
        "wie",
        "viele",
        "kamen",
    ],
}


def text(language, rng, words=40):
    return " ".join(rng.choices(WORDS[language], k=words)) + "."


@pytest.fixture
def model(tmp_path):
    rng = random.Random(1)
    return str(fasttext_model.write(tmp_path / "lid.bin", {name: [text(name, rng, 400)] for name in WORDS}))


def test_documents_are_kept_by_label_probability(model):
    rng = random.Random(2)
    english, german = text("en", rng), text("de", rng)
    one, both = Classifier(model, ("en",), 0.65), Classifier(model, ("en", "de"), 0.65)
    assert one.keeps(english) and not one.keeps(german) and both.keeps(english) and both.keeps(german)
    mixed = " ".join(WORDS["en"][:8] + WORDS["de"][:8])
    assert not Classifier(model, ("en",), 0.999).keeps(mixed) and Classifier(model, ("en",), 0.0).keeps(mixed)
    assert not one.keeps("") and not one.keeps("\n\n")  # tells nothing
    assert one.keeps(english.replace(" ", "\n")) and one.keeps(text("en", rng, 4000)[:10_000] + german * 900)


def test_mistakes_are_named(model, tmp_path):
    (tmp_path / "no.bin").write_bytes(b"no model")
    for classifier, said in (
        (Classifier(str(tmp_path / "gone.bin"), ("en",), 0.5), "gone.bin: no such model file"),
        (Classifier(str(tmp_path / "no.bin"), ("en",), 0.5), "no.bin: not a fastText model"),
        (Classifier(model, (), 0.5), "name the labels"),
        (Classifier(model, ("en",), 1.5), "lies in 0..1, not 1.5"),
    ):
        with pytest.raises(BadInput, match=said):
            classifier.check()


def test_corpora_keep_their_languages(model, tmp_path):
    rng = random.Random(3)
    for name, count in (("a", 60), ("b", 40)):
        lines = [text("en" if i % 2 else "de", rng) for i in range(count)]
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        f'language_model = "{model}"\nlanguage = "en"\ntext_documents = "line"\nno_nsp = true\nseq_len = 32\nheld_out = 0\n'
        f'tokenizer = "{OLD}/dataset/tokenizer.model"\n[corpus.a]\ninput = "{tmp_path}/a.txt"\n'
        f'[corpus.b]\ninput = "{tmp_path}/b.txt"\nlanguage = ["en", "de"]\n'
    )
    assert main(["build", str(recipe), "--output", str(tmp_path / "out"), "--workers", "1", "--quiet"]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["dropped"]["reasons"] == {"language": 30}
    assert report["corpora"]["a"]["dropped_while_reading"] == {"language": 30}
    options = [
        "--input",
        f"{tmp_path}/a.txt",
        "--text-documents",
        "line",
        "--no-nsp",
        "--seq-len",
        "32",
        "--held-out",
        "0",
    ]
    options += ["--tokenizer", f"{OLD}/dataset/tokenizer.model", "--quality-model", model, "--quality-label", "de"]
    assert main(["build", *options, "--output", str(tmp_path / "two"), "--workers", "1", "--quiet"]) == 0
    report = json.loads((tmp_path / "two" / "report.json").read_text())
    assert report["dropped"]["reasons"] == {"model quality": 30}
    assert str(model) in json.loads((tmp_path / "two" / "build.json").read_text())["models"]


def test_build_with_models_is_reproducible(model, tmp_path):
    rng = random.Random(4)
    (tmp_path / "in").mkdir()
    lines = [text("en" if i % 2 else "de", rng) for i in range(40)]
    (tmp_path / "in" / "a.txt").write_text("\n".join(lines))
    common = ["--workers", "1", "--quiet"]
    command = [
        "build", "--input", f"{tmp_path}/in", "--text-documents", "line", "--no-nsp", "--seq-len", "32", "--held-out", "0",
        "--tokenizer", f"{OLD}/dataset/tokenizer.model", "--language-model", model, "--language", "en",
        "--quality-model", model, "--quality-label", "en", *common,
    ]  # fmt: skip
    for _ in range(2):
        assert main([*command, "--output", f"{tmp_path}/out"]) == 0
