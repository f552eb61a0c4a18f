"""The tables of the documentation are those that benchmarks/tables.py makes from the committed results."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tables

RESULTS, PAGE = "benchmarks/results", "docs/measurements.md"
NAMED = re.compile(r"([\w.-]+_\d{4}-\d\d-\d\d\.(?:json|svg)|\b(?:speedrun|search_[\w-]+)\.json)")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with the pages and the results."""
    for page in tables.PAGES:
        (tmp_path / page).parent.mkdir(exist_ok=True)
        shutil.copy(tables.ROOT / page, tmp_path / page)
    shutil.copytree(tables.ROOT / RESULTS, tmp_path / RESULTS)
    return tmp_path


def test_committed_pages_are_what_the_results_give(capsys) -> None:
    assert tables.main(["--check"]) == 0, capsys.readouterr().out
    shown = [match[1] for page in tables.PAGES for match in tables.BLOCK.finditer((tables.ROOT / page).read_text())]
    assert sorted(shown) == sorted(tables.TABLES), "each table is on one page"


@pytest.mark.parametrize(
    ("file", "old", "new", "table"),
    [
        (f"{RESULTS}/data_cpu2_2026-11-22.json", "4.0883938864541225", "7.654", "peers"),
        (PAGE, "-1.050 ± 0.278", "-1.050 ± 0.178", "changes"),
    ],
)
def test_a_change_is_found_and_written(file: str, old: str, new: str, table: str, copy: Path, capsys) -> None:
    committed = (copy / PAGE).read_text()
    text = (copy / file).read_text()
    assert old in text
    (copy / file).write_text(text.replace(old, new))
    changed = (copy / PAGE).read_text()
    assert tables.main(["--check"], copy) == 1 and (copy / PAGE).read_text() == changed, "--check writes nothing"
    expected = f"{PAGE}: table {table} is not what the results give; run python benchmarks/tables.py\n"
    assert expected in capsys.readouterr().out
    assert tables.main([], copy) == tables.main(["--check"], copy) == 0
    assert (copy / PAGE).read_text() == (committed if file == PAGE else committed.replace("4.09; 21.3", "7.65; 21.3"))


def test_a_missing_page_is_one_clear_line(copy: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        tables.main(["docs/nowhere.md"], copy)
    assert "error: docs/nowhere.md: " in capsys.readouterr().err


def test_an_unknown_table_is_one_clear_line(copy: Path, capsys) -> None:
    page = copy / "docs/measurements.md"
    page.write_text(page.read_text().replace("table: race", "table: rice"))
    with pytest.raises(SystemExit):
        tables.main([], copy)
    assert "docs/measurements.md: table rice: one of readme, peers" in capsys.readouterr().err


@pytest.mark.parametrize("page", tables.PAGES)
def test_every_result_named_exists(page: str) -> None:
    names = set(NAMED.findall((tables.ROOT / page).read_text()))
    assert names and not [name for name in names if not (tables.ROOT / RESULTS / name).is_file()]


def test_minutes_to_a_loss_are_interpolated() -> None:
    curve = [{"seconds": 60.0, "bits": 3.0}, {"seconds": 120.0, "bits": 2.0}, {"seconds": 180.0, "bits": 1.0}]
    assert tables.reached(curve, 1.5) == 2.5 and tables.reached(curve, 2.0) == 2
    with pytest.raises(ValueError, match=r"ends at 1.0 bits a byte, above 0.9"):
        tables.reached(curve, 0.9)


def test_a_ratio_is_above_1_if_ours_is_better(tmp_path: Path) -> None:
    (tmp_path / RESULTS).mkdir(parents=True)
    rows = [{"ours": {"mean": 2.0, "std": 0.25}, "peer": 5.0, "ratio": 1.5}]
    (tmp_path / RESULTS / "one.json").write_text(json.dumps({"rows": rows}))

    def cells(**more: Any) -> tuple[str, str, str]:
        return tables.Pair("one", "rows/0/*", "ours", "peer", ".1f", **more).cells(tables.Results(tmp_path))

    assert cells() == ("2.0 ± 0.2", "5.0", "0.4")
    assert cells(better="less", scale=10) == ("20.0 ± 2.5", "50.0", "2.5")
    assert cells(ratio="rows/0/ratio")[2] == "1.5" and cells(better="")[2] == ""


def test_claims_about_the_tables_hold() -> None:
    """What the page says beside the tables: all runs below the peer's loss, no score outside its interval."""
    results = tables.Results(tables.ROOT)
    runs = tables.seeds(results("speedrun"), "1.8min-2cores", "muon-128").values()
    (peer,) = tables.seeds(results("speedrun"), "120min-2cores", "hf-tuned").values()
    assert max(run["loss"] for run in runs) < peer["loss"]
    for task, (file, _) in tables.TASKS.items():
        gains = results(f"finetune_trainer_{file}_cpu2_2026-11-29", f"tasks/{task}/gains")
        assert len(gains) == 2 and all(gain["low"] < 0 < gain["high"] for gain in gains.values()), task
