"""Race: budgets, the held-out split, recipe files, bits a byte, records, comparisons, the picture."""

from __future__ import annotations

import bz2
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.race import dataset, recipes, records
from benchmarks.race.recipes import TRACKS, RaceRecipe, track_of
from benchmarks.race.records import Records
from megabert import config as configuration
from megabert.data.shards import Dataset
from tests.conftest import ROOT

GOLDEN = ROOT / "tests/data/golden/dataset"
DATA = {"documents": "d", "train": "t", "held_out": "h"}


def test_a_track_is_minutes_or_tokens() -> None:
    half_hour, tiny = track_of("30min-2cores"), track_of("1.5k-tokens")
    assert (half_hour.minutes, half_hour.cores, half_hour.tokens) == (30.0, 2, 0)
    assert (tiny.minutes, tiny.tokens) == (0.0, 1500)
    for wrong in ("30min", "0min-2cores", "0m-tokens", "5m", "1min-0cores"):
        with pytest.raises(ValueError, match="--track"):
            track_of(wrong)


def test_no_document_is_on_both_sides(tmp_path: Path) -> None:
    articles = [f'<doc id="{n}">\nTitle {n}\n\nText {n}.\n</doc>\n'.encode() for n in range(2000)]
    for folder in ("AA", "AB"):
        (tmp_path / "text/enwiki" / folder).mkdir(parents=True)
        half = articles[:1000] if folder == "AA" else articles[1000:]
        (tmp_path / "text/enwiki" / folder / "wiki_00.bz2").write_bytes(bz2.compress(b"".join(half)))
    (tmp_path / "text/novels").mkdir()
    (tmp_path / "text/novels/One.txt").write_bytes(b"A novel.\r\n")
    dataset.split(tmp_path / "text", tmp_path / "out")
    parts = {
        part: b"".join(path.read_bytes() for path in sorted((tmp_path / "out" / part).iterdir()))
        for part in ("train", "held_out")
    }
    found = {part: set(dataset.WIKI_DOCUMENT.findall(text)) for part, text in parts.items()}
    assert not found["train"] & found["held_out"] and found["train"] | found["held_out"] == set(articles)
    assert 5 < len(found["held_out"]) < 40 and b"A novel." in b"".join(parts.values())
    mark = json.loads((tmp_path / "out" / dataset.MARK).read_text())
    assert mark["counts"] == {part: len(f) + (b"novel" in parts[part]) for part, f in found.items()}
    (tmp_path / "text/novels/One.txt").write_bytes(b"Another novel.\r\n")
    dataset.split(tmp_path / "text", tmp_path / "again")
    assert json.loads((tmp_path / "again" / dataset.MARK).read_text())["documents"] == mark["documents"]


def test_bits_a_byte_do_not_depend_on_the_vocabulary() -> None:
    """A model that knows nothing of a text of independent bytes: 8 bits a byte, with tokens of one byte or of two."""
    ones, twos = (dataset.figures(math.log(256**n), 0.0, float(n))["bits"] for n in (1, 2))
    assert ones == twos == 8.0
    rows = Dataset(GOLDEN).read(np.arange(536))
    size = dataset.bytes_a_token(GOLDEN)
    text = sum(len(piece) for piece in decoded(rows.ids))
    assert size == pytest.approx(text / (rows.ids > 4).sum())


def decoded(ids: np.ndarray) -> list[bytes]:
    from megabert.data.tokenizer import Tokenizer

    pieces = Tokenizer.load(GOLDEN / "tokenizer.model").tokens
    return [pieces[i].encode() for i in ids.ravel().tolist() if i > 4]


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_makes_a_run_of_every_track(name: str) -> None:
    recipe = recipes.load(name)
    if recipe.system == recipes.PEER:
        peer = pytest.importorskip("benchmarks.peers.hf_plain_loop")
        found, sizes = peer.recipe_of({"minutes": 1.0, "seed": 1, **recipe.keys, "model.hidden": 192})
        assert found.lr == recipe.keys["lr"] and sizes == ["model.hidden=192"]
        with pytest.raises(ValueError, match="lrr"):
            peer.recipe_of({"minutes": 1.0, "lrr": 1})
        return
    for track in map(track_of, TRACKS):
        _, config = recipes.our_config(recipe, track, tokens_a_row=115.0, seed=43)
        assert config.seed == 43 and not config.model.nsp
        if track.minutes:
            assert config.schedule.budget_minutes == track.minutes
        else:
            seen = config.schedule.total_steps * config.batch.global_size * 115.0
            assert seen == pytest.approx(track.tokens, rel=0.001)


def test_the_preset_is_the_recipe_of_the_record() -> None:
    _, raced = recipes.our_config(recipes.load("muon-192"), track_of("30min-2cores"), tokens_a_row=115.0, seed=1)
    preset = configuration.load("mini_modern", ["seed=1"])
    kept = {"checkpoint", "eval", "log"}
    assert preset.model_dump(exclude=kept) == raced.model_dump(exclude=kept)


def test_recipe_digest_covers_only_what_is_trained() -> None:
    keys = {"optimizer.lr": 1e-3, "model.norm": "pre", "model.nsp": False, "warmup": 0.1}
    recipe = RaceRecipe("one", about="what it is", change="a change", vocabulary=8000, keys=keys)
    assert replace(recipe, name="two", about="", change="").digest == recipe.digest
    assert replace(recipe, keys=keys | {"optimizer.lr": 2e-3}).digest != recipe.digest
    overrides, config = recipes.our_config(recipe, track_of("1m-tokens"), tokens_a_row=100.0, seed=1)
    assert "model.norm=pre" in overrides and "model.nsp=false" in overrides
    assert (config.schedule.total_steps, config.schedule.warmup_steps) == (625, 62)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("keys = 1\nabout = 1\nlr = 2", "unexpected keyword argument 'lr'"),
        ("change = ''", "argument: 'about'"),
        ("about = 'a'\nsystem = 'x'", "system must be"),
        ("about = 'a'\n[keys]\n'schedule.total_steps' = 5", "schedule.total_steps is the track's"),
        ("about =", "recipe.toml"),
    ],
)
def test_a_wrong_recipe_names_file_and_field(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(ValueError, match=said) as error:
        recipes.load(str(tmp_path / "recipe.toml"))
    assert "recipe.toml" in str(error.value)


def result(bits: float, date: str) -> dict:
    curve = [{"seconds": 6.0 * n, "tokens": 1000 * n, "loss": 9.0 - n, "accuracy": 0.1 * n} for n in range(3)]
    figures = {"bits": bits, "loss": 3 * bits, "accuracy": 0.2, "tokens": 2e6}
    return {"date": date, "hardware": "2 cores, X; no GPU", "curve": curve} | figures


def test_entries_are_kept_and_best_first(tmp_path: Path) -> None:
    kept, track = Records(tmp_path / "records.json"), track_of("5m-tokens")
    for name, day, scores in (
        ("first", 1, (2.0, 2.1, 2.2)),
        ("worse", 2, (2.3, 2.3, 2.3)),
        ("two seeds", 3, (1.0, 1.0)),
        ("better", 4, (1.9, 2.0, 1.8)),
    ):
        recipe = RaceRecipe(name, about=name, keys={"optimizer.lr": day / 1000})
        entry = kept.entry(track, recipe, DATA)
        for seed, bits in enumerate(scores, 42):
            entry["seeds"][str(seed)] = result(bits, f"2026-11-0{day}T00:00:0{seed - 42}+00:00")
    kept.write()
    again = Records(kept.path)
    entries = again.of("5m-tokens")
    assert [entry["recipe"] for entry in entries] == ["two seeds", "better", "first", "worse"]
    lines = records.table(again, "5m-tokens").splitlines()
    assert lines[3].startswith("| better | 1.9000 ± 0.1000 |")
    assert again.entry(track, RaceRecipe("renamed", about="x", keys={"optimizer.lr": 0.004}), DATA) is again.entries[3]
    with pytest.raises(ValueError, match="other held-out documents"):
        again.entry(track, RaceRecipe("other", about="x"), DATA | {"documents": "e"})
    pytest.importorskip("matplotlib")
    records.plot(entries, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert "million real tokens" in drawn and "<!-- better -->" in drawn
    longer = [entry | {"track": "20m-tokens"} for entry in entries[:1]]
    records.plot(entries + longer, tmp_path / "both.svg")
    assert "<!-- two seeds, 20m-tokens -->" in (tmp_path / "both.svg").read_text()
    with pytest.raises(ValueError, match="plot either"):
        records.plot([entries[0], entries[1] | {"track": "30min-2cores"}], tmp_path / "neither.svg")
    assert not (tmp_path / "neither.svg").exists()


def test_two_commands_add_to_one_records_file(tmp_path: Path) -> None:
    track, path = track_of("5m-tokens"), tmp_path / "new" / "records.json"
    both, own = RaceRecipe("both", about="both"), RaceRecipe("own", about="own", keys={"optimizer.lr": 0.1})
    one, other = Records(path), Records(path)
    one.entry(track, both, DATA)["seeds"]["42"] = result(2.0, "2026-11-01T00:00:00+00:00")
    one.write()
    other.entry(track, both, DATA)["seeds"]["43"] = result(2.1, "2026-11-01T00:00:01+00:00")
    other.entry(track, own, DATA)["seeds"]["42"] = result(1.9, "2026-11-01T00:00:02+00:00")
    other.write()
    one.entry(track, both, DATA)["seeds"]["44"] = result(2.2, "2026-11-01T00:00:03+00:00")
    one.write()
    assert [(e["recipe"], sorted(e["seeds"])) for e in Records(path).of("5m-tokens")] == [
        ("own", ["42"]),
        ("both", ["42", "43", "44"]),
    ]


def test_time_and_tokens_to_the_peers_loss() -> None:
    """Twice as fast and token for token the same: 2 in seconds, 1 in tokens."""

    def entry(name: str, *points: tuple[float, float, float]) -> dict:
        curve = [{"seconds": s, "tokens": t, "loss": loss} for s, t, loss in points]
        return {"recipe": name, "seeds": {"42": {"curve": curve}}}

    peer = entry("peer", (0, 0, 10.0), (600, 1000, 6.0))
    fast = entry("fast", (0, 0, 10.0), (150, 500, 7.0), (200, 600, 8.0), (400, 1400, 4.0))
    assert [(c["what"], c["taken"], c["ratio"]) for c in records.comparisons([fast, peer], peer)] == [
        ("seconds to the peer's loss", 300.0, 2.0),
        ("tokens to the peer's loss", 1000.0, 1.0),
    ]
    assert records.comparisons([entry("slow", (0, 0, 10.0), (900, 9000, 6.1))], peer) == []
