"""Race: budgets, the held-out split, recipe files, bits a byte, records, comparisons, the picture."""

from __future__ import annotations

import bz2
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import reproduce, speedrun
from benchmarks.race import dataset, recipes, records, training
from benchmarks.race.dataset import Scorer
from benchmarks.race.recipes import TRACKS, RaceRecipe, Track, track_of
from benchmarks.race.records import Records
from megabert import config as configuration
from megabert.config import Config
from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer
from megabert.hf.mapping import find_model_type
from tests.conftest import ROOT

GOLDEN = ROOT / "tests/data/golden/dataset"
DATA = {"documents": "d", "train": "t", "held_out": "h"}


def test_a_track_is_minutes_or_tokens() -> None:
    half_hour, tiny = track_of("30min-2cores"), track_of("1.5k-tokens")
    assert (half_hour.minutes, half_hour.cores, half_hour.tokens, tiny.minutes, tiny.tokens) == (30.0, 2, 0, 0.0, 1500)
    for wrong in ("30min", "0min-2cores", "0m-tokens", "5m", "1min-0cores"):
        with pytest.raises(ValueError, match="--track"):
            track_of(wrong)


def test_no_document_is_on_both_sides(tmp_path: Path) -> None:
    articles = [f'<doc id="{n}">\nTitle {n}\n\nText {n}.\n</doc>\n'.encode() for n in range(2000)]
    for folder, half in (("enwiki/AA", articles[:1000]), ("enwiki/AB", articles[1000:])):
        (tmp_path / "text" / folder).mkdir(parents=True)
        (tmp_path / "text" / folder / "wiki_00.bz2").write_bytes(bz2.compress(b"".join(half)))
    (tmp_path / "text/novels").mkdir()
    (tmp_path / "text/novels/One.txt").write_bytes(b"A novel.\r\n")
    dataset.split(tmp_path / "text", tmp_path / "out")
    parts = (sorted((tmp_path / "out" / part).iterdir()) for part in ("train", "held_out"))
    train, held_out = (b"".join(path.read_bytes() for path in part) for part in parts)
    kept, held = (set(dataset.WIKI_DOCUMENT.findall(text)) for text in (train, held_out))
    assert not kept & held and kept | held == set(articles)
    assert 5 < len(held) < 40 and b"A novel." in train + held_out
    assert sum(json.loads((tmp_path / "out" / dataset.MARK).read_text())["counts"].values()) == 2001


def test_bits_a_byte_do_not_depend_on_the_vocabulary() -> None:
    """A model that knows nothing of a text of independent bytes: 8 bits a byte, with tokens of one byte or of two."""
    ones, twos = (dataset.figures(math.log(256**n), 0.0, float(n))["bits"] for n in (1, 2))
    assert ones == twos == 8.0
    ids = Dataset(GOLDEN).read(np.arange(536)).ids
    tokens = Tokenizer.load(GOLDEN / "tokenizer.model").tokens
    text = sum(len(tokens[i].encode()) for i in ids.ravel().tolist() if i > 4)
    assert Scorer(GOLDEN, 8, 1).bytes_per_token == pytest.approx(text / (ids > 4).sum())


def our_config(recipe: str | RaceRecipe, track: str | Track, tokens_a_row: float, seed: int = 1) -> Config:
    recipe = recipes.load(recipe) if isinstance(recipe, str) else recipe
    track = track_of(track) if isinstance(track, str) else track
    return recipes.our_config(recipe, track, tokens_a_row=tokens_a_row, seed=seed)[1]


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_makes_a_run_of_every_track(name: str) -> None:
    recipe = recipes.load(name)
    if recipe.system == recipes.PEER:
        peer = pytest.importorskip("benchmarks.peers.hf_plain_loop")
        found, sizes = peer.recipe_of({"minutes": 1.0, "seed": 1, **recipe.keys, "model.hidden": 192})
        assert found.lr == recipe.keys["lr"] and "model.hidden=192" in sizes
        norm, kind = ("pre", "modernbert") if "model.kind=modern" in sizes else ("post", "bert")
        config = configuration.load(recipe.preset, [*sizes, f"model.norm={norm}", "model.nsp=false"])
        assert find_model_type(config.model) == kind
        with pytest.raises(ValueError, match="lrr"):
            peer.recipe_of({"minutes": 1.0, "lrr": 1})
        return
    for track in map(track_of, TRACKS):
        config = our_config(recipe, track, 115.0, seed=43)
        assert config.seed == 43 and not config.model.nsp
        if track.minutes:
            assert config.schedule.budget_minutes == track.minutes
        else:
            seen = config.schedule.total_steps * recipes.rows_an_update(config) * 115.0
            assert seen == pytest.approx(track.tokens, rel=0.001)


def test_points_of_a_curve_are_spread_over_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the speed of the machine, and also where the preset saves every two minutes."""
    commands: list[list[str]] = []
    monkeypatch.setattr(training.hardware, "call", lambda command, *_: commands.append(command))
    monkeypatch.setattr(training.hardware, "logged", lambda run: [])
    data, recipe = dataset.RaceData(GOLDEN, GOLDEN, "d"), recipes.load("modern-128")
    for track in ("120min-2cores", "5m-tokens"):
        training.train_ours(recipe, track_of(track), data, tmp_path, seed=1)
    minutes, tokens = map(set, commands)
    assert minutes >= {"checkpoint.interval=0", "checkpoint.minutes=12"}
    tenth = round(our_config(recipe, "5m-tokens", data.tokens_a_row).schedule.total_steps / 10)
    assert tokens >= {f"checkpoint.interval={tenth}", f"checkpoint.keep_every={tenth}"}


def test_presets_are_the_recipes_of_the_records() -> None:
    kept = {"checkpoint", "eval", "log"}
    preset, raced = configuration.load("mini_modern", ["seed=1"]), our_config("modern-192-init", "30min-2cores", 115.0)
    assert preset.model_dump(exclude=kept) == raced.model_dump(exclude=kept)
    preset, raced = configuration.load("babylm_10m", ["seed=1"]), our_config("words-10m", "130m-tokens", 128.0)
    expected = raced.model_dump(exclude=kept | {"schedule"})
    expected["data"]["seq_len"] = 128  # for a plan without data
    assert preset.model_dump(exclude=kept | {"schedule"}) == expected
    shape = {"name", "decay_share", "final_ratio"}
    assert preset.schedule.model_dump(include=shape) == raced.schedule.model_dump(include=shape)
    assert preset.schedule.warmup_share == pytest.approx(raced.schedule.warmup_share, rel=1e-2)


def test_the_control_ramps_batch_and_masking_as_published() -> None:
    config = our_config("gpt-bert", "20m-tokens", 128.0)
    phases = [phase.config for phase in configuration.list_phases(config)]
    # 32,768 tokens, from a quarter on: 7,812 updates are 160 M tokens
    assert [phase.batch.global_size for phase in phases] == [64, 128, 192, 256]
    assert recipes.rows_an_update(config) == 160
    masking = [phase.data.masking for phase in phases]
    assert [(m.rate, m.causal_every) for m in masking] == [(rate, 16) for rate in (0.3, 0.25, 0.2, 0.15)]
    words = recipes.load("words-10m").keys
    assert (config.model.layers, config.model.hidden) == (words["model.layers"], words["model.hidden"])


def test_recipe_digest_covers_only_what_is_trained() -> None:
    keys = {"optimizer.lr": 1e-3, "model.norm": "pre", "model.nsp": False, "warmup": 0.1}
    recipe = RaceRecipe("one", about="what it is", change="a change", vocabulary=8000, keys=keys)
    assert replace(recipe, name="two", about="", change="").digest == recipe.digest
    assert replace(recipe, keys=keys | {"optimizer.lr": 2e-3}).digest != recipe.digest
    config = our_config(recipe, "1m-tokens", 100.0)
    assert (config.schedule.total_steps, config.schedule.warmup_steps) == (625, 62)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keys = 1\nabout = 1\nlr = 2", "unexpected keyword argument 'lr'"),
        ("change = ''", "argument: 'about'"),
        ("about = 'a'\nsystem = 'x'", "system must be"),
        ("about = 'a'\n[keys]\n'schedule.total_steps' = 5", "schedule.total_steps is the track's"),
        ("about =", "recipe.toml"),
    ],
)
def test_a_wrong_recipe_names_file_and_field(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        recipes.load(str(tmp_path / "recipe.toml"))
    assert "recipe.toml" in str(error.value)


def result(bits: float) -> dict:
    curve = [{"seconds": 6.0 * n, "tokens": 1000 * n, "bits": 3.0 - n, "accuracy": 0.1 * n} for n in range(3)]
    figures = {"bits": bits, "loss": 3 * bits, "accuracy": 0.2, "tokens": 2e6}
    return {"date": "2026-11-01", "hardware": "2 cores, X; no GPU", "curve": curve} | figures


def test_two_commands_add_to_one_records_file(tmp_path: Path) -> None:
    track, path = track_of("5m-tokens"), tmp_path / "new" / "records.json"
    both, own = RaceRecipe("both", about="both"), RaceRecipe("own", about="own", keys={"optimizer.lr": 0.1})
    one, other = Records(path), Records(path)
    for records_, recipe, seed, bits in ((one, both, "42", 2.0), (other, both, "43", 2.1), (other, own, "42", 1.9)):
        records_.entry(track, recipe, DATA)["seeds"][seed] = result(bits)
        records_.write()
    one.entry(track, both, DATA)["seeds"]["44"] = result(2.2)
    one.write()
    again = Records(path)
    entries = again.of("5m-tokens")
    assert [(e["recipe"], sorted(e["seeds"])) for e in entries] == [("own", ["42"]), ("both", ["42", "43", "44"])]
    assert records.table(again, "5m-tokens").splitlines()[3].startswith("| both | 2.1000 ± 0.1000 |")
    assert again.entry(track, replace(both, name="renamed"), DATA) is entries[1]
    with pytest.raises(ValueError, match="other held-out documents"):
        again.entry(track, both, DATA | {"documents": "e"})


def test_plots_are_of_minutes_or_of_tokens(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    entry = {"recipe": "one", "system": "megabert", "seeds": {"42": result(2.0)}}
    both = [entry | {"track": track} for track in ("5m-tokens", "20m-tokens")]
    records.plot(both, tmp_path / "both.svg")
    drawn = (tmp_path / "both.svg").read_text()
    assert "million real tokens" in drawn and "<!-- MegaBERT, one, 20m-tokens -->" in drawn
    with pytest.raises(ValueError, match="plot either"):
        records.plot([both[0], entry | {"track": "30min-2cores"}], tmp_path / "neither.svg")


def test_time_and_tokens_to_the_peers_loss() -> None:
    """Twice as fast and token for token the same: 2 in seconds, 1 in tokens, to the mean of the peer's seeds."""

    def entry(name: str, *points: tuple[float, float, float]) -> dict:
        curve = [dict(zip(("seconds", "tokens", "bits"), point, strict=True)) for point in points]
        return {"recipe": name, "seeds": {"42": {"curve": curve}}}

    peer = entry("peer", (0, 0, 10.0), (540, 900, 5.0))
    peer["seeds"] |= {"43": entry("peer", (0, 0, 10.0), (660, 1100, 7.0))["seeds"]["42"]}
    fast = entry("fast", (0, 0, 10.0), (150, 500, 7.0), (200, 600, 8.0), (400, 1400, 4.0))
    found = [(c["what"].split()[0], c["taken"], c["ratio"]) for c in records.comparisons([fast, peer], peer)]
    assert found == [("seconds", 300.0, 2.0), ("tokens", 1000.0, 1.0)]
    never = records.comparisons([entry("slow", (0, 0, 10.0), (900, 9000, 6.1))], peer)
    assert [(c["taken"], c["ratio"]) for c in never] == [(None, None)] * 2, "left out it would not count"


def test_a_record_needs_a_gain_that_is_no_chance() -> None:
    runs = {"first": (2.00, 2.02, 1.98), "chance": (1.97, 2.01, 1.99), "lucky": (1.50,), "second": (1.90, 1.92, 1.88)}
    entries: list[records.Entry] = [
        {"recipe": name, "seeds": {str(n): {"bits": one, "date": f"2026-01-0{day}"} for n, one in enumerate(bits)}}
        for day, (name, bits) in enumerate(runs.items(), 1)
    ]
    found = records.history(entries[::-1])
    assert [one["recipe"] for one, _ in found] == ["first", "second"]
    # t = 0.1 / sqrt(2 * 0.02^2 / 3) = 6.12 with 4 degrees of freedom
    assert found[0][1] is None and found[1][1] == pytest.approx(0.0018, abs=1e-4)


def test_a_result_lies_in_a_band_of_the_seeds() -> None:
    """Student's t of two degrees of freedom: 0.816 at 50%, 4.303 at 95%, 9.925 at 99%."""
    bits, unit = [1.0, 1.1, 1.2], 0.1 * math.sqrt(4 / 3)
    found = [reproduce.band(bits, 1.1 + share * unit) for share in (0.0, -0.81, 0.82, 4.30, -4.31, 9.92, 9.93)]
    assert found == [0.5, 0.5, 0.95, 0.95, 0.99, 0.99, None]
    with pytest.raises(ValueError, match="the record has one seed"):
        reproduce.band([1.0], 1.0)


def test_a_record_without_a_band_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Records(tmp_path / "records.json")
    kept.entry(track_of("3min-2cores"), recipes.load("plain"), DATA)["seeds"]["42"] = {"date": "", "bits": 2.0}
    kept.write()
    monkeypatch.setattr("sys.argv", ["reproduce.py", "3min-2cores/plain", "--records", str(kept.path)])
    monkeypatch.setattr(dataset, "prepare", lambda *_: pytest.fail("its budget is spent"))
    with pytest.raises(ValueError, match="the record has one seed"):
        reproduce.main()


def test_records_are_shown_on_fewer_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    words = ["speedrun.py", "--track", "3min-4096cores", "--json", str(tmp_path / "records.json")]
    monkeypatch.setattr("sys.argv", [*words, "--history"])
    speedrun.main()
    assert capsys.readouterr().out.startswith("| date | recipe |")
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(ValueError, match="this machine has"):
        speedrun.main()


def test_every_record_describes_what_was_trained(tmp_path: Path) -> None:
    known = Records(records.RECORDS)
    for entry in known.entries:
        _, recipe = known.find(f"{entry['track']}/{entry['recipe']}")
        assert recipe.keys == entry["keys"]
    entry["keys"] = entry["keys"] | {"optimizer.lr": 0.5}
    with pytest.raises(ValueError, match="does not describe what was trained"):
        known.find(f"{entry['track']}/{entry['recipe']}")
