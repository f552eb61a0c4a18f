"""The Python face of the project: trained models and datasets, and models trained in one's own loop; misuse is one line."""

import inspect
import re
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import DataLoader

import megabert
from megabert.commands import loaded_model
from megabert.data.loader import Loader
from megabert.data.tokenizer import Tokenizer
from megabert.hf.packing import pack
from tests.helpers import fast_tokenizers, runs
from tests.helpers.golden_runs import DATA
from tests.integration.conftest import command, logged

TEXT = "the quick [MASK] fox"
# what programs call: a change of these takes a deprecation
PUBLIC = {
    "Dataset": "(folder, manifest=None, cache=DEFAULT)",
    "batches": "(dataset, rows=32, seed=42, workers=0, start=0)",
    "load": "(source, tokenizer='')",
    "training": "(run, config='', *overrides, data='', stop_after=None)",
    "LoadedModel.encode": "(self, texts, pool='mean')",
    "LoadedModel.export": "(self, output, overwrite=False)",
    "LoadedModel.fill": "(self, text, top=5)",
    "LoadedModel.logits": "(self, texts)",
    "LoadedModel.save": "(self, run)",
}


def signature(function) -> str:
    """Names and defaults of parameters."""
    found = inspect.signature(function)
    parameters = [each.replace(annotation=each.empty) for each in found.parameters.values()]
    return re.sub(
        r"<.*>|Cache\(.*?\)", "DEFAULT", str(found.replace(parameters=parameters, return_annotation=found.empty))
    )


def test_public_names_keep_their_signatures():
    found = {name: getattr(megabert, name) for name in megabert.__all__ if name != "LoadedModel"}
    methods = {name: value for name, value in vars(megabert.LoadedModel).items() if not name.startswith("_")}
    found |= {f"LoadedModel.{name}": value for name, value in methods.items() if inspect.isfunction(value)}
    assert {name: signature(function) for name, function in found.items()} == PUBLIC
    assert {name for name, value in methods.items() if not inspect.isfunction(value)} == {"model", "tokenizer"}


def test_a_loaded_run_encodes_and_fills(tmp_path):
    loaded = megabert.load(runs.make(tmp_path))
    texts = ["the quick brown fox", "she sells sea shells by the sea shore"]
    vectors = loaded.encode(texts)
    assert vectors.shape == (2, loaded.model.cfg.hidden) and vectors.dtype == np.float32
    np.testing.assert_allclose(loaded.encode(texts[1:])[0], vectors[1], atol=1e-5)
    np.testing.assert_array_equal(loaded.encode(texts[1]), loaded.encode(texts[1:]))
    assert not np.allclose(loaded.encode(texts, pool="cls"), vectors, atol=1e-3)
    ((first, *others),) = loaded.fill("the [MASK] fox", top=3)
    assert len(others) == 2 and 1 >= first[1] >= others[0][1] > 0 and isinstance(first[0], str)
    assert loaded.tokenizer.vocab_size == loaded.model.cfg.vocab_size


@pytest.mark.parametrize("shape", [{}, {"causal": True}, {"kind": "uncased", "norm": "pre"}])
def test_ids_alone_give_the_logits_of_packed_rows(shape: dict[str, object], tmp_path):
    loaded, causal = megabert.load(runs.make(tmp_path, **shape)), "causal" in shape
    texts = ["the quick [MASK] fox", "she sells", "[MASK][MASK] by the sea shore."]
    ids = loaded.tokenizer(texts)
    assert ids.dtype == torch.int32 and (ids == loaded.tokenizer.mask_id).sum(1).tolist() == [1, 0, 2]
    logits = loaded.logits(texts)
    assert logits.shape == (*ids.shape, loaded.tokenizer.vocab_size) and logits.equal(loaded.logits(ids.long()))
    with torch.no_grad():
        for row, want in zip(ids, logits, strict=True):
            alone = row[row != 0].numpy()
            hidden = loaded.model.encode(**pack([alone], [len(alone)], causal=causal).inputs())
            torch.testing.assert_close(loaded.model.mlm_logits(hidden[0]), want[: len(alone)], atol=1e-5, rtol=0)
    found = loaded.model(ids, causal=causal)
    assert found.equal(logits)
    if not causal:
        found.sum().backward()
        assert loaded.model.layers[0].qkv.weight.grad is not None
        (words,) = loaded.fill(texts[0], top=1)
        place = int((ids[0] == loaded.tokenizer.mask_id).nonzero()[0])
        assert words[0][1] == pytest.approx(float(logits[0, place].softmax(-1).max()), abs=1e-6)


def test_rows_are_read_by_loaders_numbers_and_slices():
    dataset = megabert.Dataset(DATA)
    stored = next(iter(DataLoader(dataset, batch_size=4)))
    want = dataset.read(np.arange(4))
    np.testing.assert_array_equal(stored["ids"].numpy(), want.ids)
    np.testing.assert_array_equal(stored["bounds"].numpy(), want.bounds)
    assert sum(len(batch["ids"]) for batch in DataLoader(dataset, batch_size=100)) == len(dataset) == dataset.rows
    np.testing.assert_array_equal(dataset[-1]["ids"], dataset[dataset.rows - 1]["ids"])
    assert [row["ids"].tolist() for row in dataset[2:8:3]] == [dataset[i]["ids"].tolist() for i in (2, 5)]
    for outside in (dataset.rows, -dataset.rows - 1):
        with pytest.raises(IndexError, match=f"has rows 0 to {dataset.rows - 1}"):
            dataset[outside]
    with pytest.raises(TypeError, match="a row is a number or a slice, not str"):
        dataset["ids"]  # type: ignore[index]


def test_batches_are_those_of_a_run():
    dataset = megabert.Dataset(DATA)
    tokenizer = Tokenizer.load(dataset.tokenizer_path)
    run = Loader(dataset, tokenizer, global_batch=8, micro_batch=8, seed=3, start_step=2)
    ours = megabert.batches(dataset, rows=8, seed=3, start=2)
    for _ in range(2):
        want, batch = next(run).batches[0], next(ours)
        assert batch.row_ids.tolist() == want.row_ids.tolist() and batch.input_ids.equal(want.input_ids)
        assert batch.mlm_labels.equal(want.mlm_labels)
    for wrong in ({"rows": 0}, {"rows": "3"}, {"seed": -1}, {"seed": 2**63}, {"workers": -1}, {"start": -1}):
        ((name, value),) = wrong.items()
        with pytest.raises(ValueError, match=rf"{name}={value!r}: must be a whole number of"):
            next(megabert.batches(dataset, **wrong))


@pytest.fixture
def trained(tmp_path):
    """A model whose weights were changed in memory."""
    model = megabert.load(runs.make(tmp_path / "run"))
    before = model.encode(TEXT)
    optimizer = torch.optim.SGD(model.model.parameters(), lr=0.5)
    model.model(model.tokenizer(TEXT)).logsumexp(-1).sum().backward()
    optimizer.step()
    assert not np.allclose(model.encode(TEXT), before, atol=1e-3), "vectors are of the weights as they are now"
    return model


def test_a_trained_model_is_exported_as_it_is(trained, tmp_path):
    want, run = trained.logits(TEXT), trained.pretrained.run_dir
    (run / "metrics.jsonl").write_text('{"step": 0, "eval/mlm_loss": 1.5}\n')
    megabert.load(run).export(tmp_path / "same")
    trained.export(tmp_path / "hf")
    cards = [(tmp_path / name / "README.md").read_text() for name in ("same", "hf")]
    assert ["1.5 (update 0)" in card for card in cards] == ["0, then changed outside" not in card for card in cards]
    assert "1.5 (update 0)" in cards[0] and "0, then changed outside of its run" in cards[1]
    peer = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        torch.testing.assert_close(peer(trained.tokenizer(TEXT).long()).logits, want, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="is not empty"):
        trained.export(tmp_path / "hf")
    trained.export(tmp_path / "hf", overwrite=True)


def test_a_trained_model_is_saved_as_a_run(trained, tmp_path):
    trained.save(tmp_path / "next")
    again = megabert.load(tmp_path / "next")
    assert again.logits(TEXT).equal(trained.logits(TEXT)) and again.fill(TEXT) == trained.fill(TEXT)
    assert again.pretrained.step == 0 and again.pretrained.state["dataset"].startswith("none, saved from Python")
    with pytest.raises(ValueError, match="is not empty"):
        trained.save(tmp_path / "next")
    trained.model.layers[0].qkv.weight.data[0, 0] = float("nan")
    for write in (trained.save, trained.export):
        with pytest.raises(ValueError, match=r"changed in memory: layers\.0\.qkv\.weight has NaN or infinite values"):
            write(tmp_path / "diverged")
    assert not (tmp_path / "diverged").exists()


def test_vectors_are_prepared_again_only_for_new_weights(tmp_path, monkeypatch):
    model, made = megabert.load(runs.make(tmp_path)), Mock(side_effect=loaded_model.Extractor)
    monkeypatch.setattr(loaded_model, "Extractor", made)
    weight = model.model.layers[0].qkv.weight
    before = [model.encode(TEXT, pool=pool) for pool in ("mean", "cls", "mean")]
    assert made.call_count == 1 and np.array_equal(before[0], before[2])
    weight.data += 0.1
    assert not np.allclose(model.encode(TEXT), before[0]) and made.call_count == 2


def test_predictions_have_no_dropout_and_leave_the_mode(trained):
    want = trained.logits(TEXT)
    trained.model.train()
    assert trained.model(trained.tokenizer(TEXT)).ne(want).any() and trained.logits(TEXT).equal(want)
    one, two = trained.fill([TEXT, "she [MASK] sea [MASK]"], top=2)
    assert trained.model.training and one == trained.fill(TEXT, top=2) and [len(words) for words in two] == [2, 2]


@pytest.mark.parametrize("use", ["fill", "logits"])
def test_a_new_head_predicts_once_it_is_trained_in_memory(use, tmp_path):
    model = megabert.load(runs.make(tmp_path))
    model.pretrained = replace(model.pretrained, initialised=("masked-LM head",))
    with pytest.raises(ValueError, match="has no masked-LM head"):
        getattr(model, use)(TEXT)
    model.model.mlm.weight.data += 0.1
    assert len(getattr(model, use)(TEXT)) == 1


def test_the_tokenizers_own_mask_is_filled(tmp_path):
    model = megabert.load(runs.make(tmp_path / "run", str(fast_tokenizers.write(tmp_path / "tokenizer.json"))))
    assert model.fill("the <mask> fox") == model.fill("the [MASK] fox")
    with pytest.raises(ValueError, match=r"the text has no \[MASK\] or <mask>"):
        model.fill("the fox")


def test_objects_describe_themselves(tmp_path):
    assert dir(megabert) == sorted(["__version__", *megabert.__all__])
    dataset = megabert.Dataset(DATA)
    assert repr(dataset).endswith(f": {dataset.rows:,} rows of 64, {dataset.manifest.vocab_size:,} tokens)")
    dataset.place = "https://me:secret@host/data"
    assert "secret" not in repr(dataset)
    model = megabert.load(runs.make(tmp_path))
    size = model.pretrained.config.model
    assert f"step 0: bert, {size.layers} layers of {size.hidden}" in repr(model)


def test_misuse_is_named(tmp_path):
    model = megabert.load(runs.make(tmp_path))
    with pytest.raises(ValueError, match="pool='none': choose mean, max, cls"):
        model.encode("text", pool="none")
    with pytest.raises(TypeError, match=r"dataset: expected megabert\.Dataset, got 'data'"):
        next(megabert.batches("data"))
    with pytest.raises(ValueError, match="nowhere: no such folder"):
        megabert.load("nowhere")
    with pytest.raises(ValueError, match="takes at most 40; shorten the text"):
        model.logits("fox " * 100)


OWN_LOOP = """
import sys, megabert
run, data, *overrides = sys.argv[1:]
for end in (4, None):
    with megabert.training(run, "tiny", *overrides, data=data, stop_after=end) as trainer:
        for update in trainer:
            print(update.step, update.objective, float(update.result.host_loss))
        print("finished", trainer.finished)
"""


@pytest.mark.slow
@pytest.mark.dist
def test_a_run_is_trained_update_by_update(tmp_path):
    """In one process, stopped and opened again: the losses of `megabert train` on the same data."""
    overrides = ["batch.global_size=16", "batch.micro_size=16", "schedule.total_steps=7", "schedule.warmup_steps=2"]
    overrides += ["log.interval=1", "eval.rows=16", "data.workers=0", "peak_tflops=1.0", "log.tensorboard=false"]

    def python(*words):
        done = command(*words, *overrides)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    own = python("-c", OWN_LOOP, tmp_path / "own", DATA)
    found = re.findall(r"^(\d+) masked (\d+\.\d+)$", own, re.M)
    assert [int(step) for step, _ in found] == [1, 2, 3, 4, 5, 6, 7], own
    assert re.findall(r"^finished (True|False)$", own, re.M) == ["True", "True"]
    python("-m", "megabert", "train", "--config", "tiny", "--data", DATA, "--run", tmp_path / "run")
    assert [float(loss) for _, loss in found] == pytest.approx([*logged(tmp_path / "run").values()], rel=1e-5)
    assert logged(tmp_path / "own") == logged(tmp_path / "run"), "and it writes the same files"
