"""The page of every key is the schema's, and a printed configuration is the configuration."""

import tomllib

import pytest

from megabert import config as configuration
from megabert.common import arguments
from megabert.config import reference


def test_the_page_has_every_key() -> None:
    page = reference.markdown()
    for section, about, keys in reference.sections():
        assert keys and about, section
        assert f"\n## {section or 'Outside of sections'}\n\n{about}\n\n" in page
        for key in keys:
            assert key.description and key.values, key.name
            assert f"\n| `{key.name}` | `{reference.toml_value(key.default)}` | {key.values} | " in page
    names = {key.name for _, _, keys in reference.sections() for key in keys}
    assert names == set(reference.flat_values(configuration.Config()))


@pytest.mark.parametrize("preset", ["", *arguments.presets()])
def test_a_printed_configuration_reads_back(preset: str, tmp_path) -> None:
    overrides = ["batch.global_size=96", 'data.mix={"a b" = 0.25}', 'init_from=a "quoted"\x7f run']
    config = configuration.load(preset, overrides)
    text = reference.as_toml(config, configuration.value_sources(preset, overrides))
    (tmp_path / "all.toml").write_text(text)
    assert tomllib.loads(text) == config.model_dump()
    assert configuration.load(str(tmp_path / "all.toml")) == config
    configuration.refuse_unused(str(tmp_path / "all.toml"), [], config)


def test_sources_name_preset_file_and_command_line(tmp_path) -> None:
    found = configuration.value_sources("mini_modern", ["schedule.total_steps=7", "model.layers=3"])
    assert found["schedule.total_steps"] == found["model.layers"] == "command line"
    assert found["model.hidden"] == "preset mini_modern" and "log.wandb" not in found
    parts = [f"{key}=0.5" for key in ("phases.1.share", "phases.2.share", "data.mix.a", "data.mix.b")]
    found_parts = configuration.value_sources("tiny_phases", parts)
    assert [found_parts["phases"], found_parts["data.mix"]] == ["preset tiny_phases and command line", "command line"]
    (tmp_path / "own.toml").write_text('data.mix = {"data/books" = 0.3}\n')
    assert configuration.value_sources(str(tmp_path / "own.toml"), [])["data.mix"] == f"file {tmp_path / 'own.toml'}"
    config = configuration.load("mini_modern", ["schedule.total_steps=7"])
    lines = reference.as_toml(config, found).splitlines()
    assert [line.split("#")[1].strip() for line in lines if line.startswith("total_steps = 7 ")] == ["command line"]


def test_explain_describes_a_section_or_key() -> None:
    config, found = configuration.Config(), {"schedule.power": "preset x"}
    section = reference.explain("schedule", config, found)
    assert section.startswith("[schedule]  Warm-up, then decay") and section.count("    from: ") > 8
    assert "schedule.final_ratio = 0.0    from: default\n" in section and "float from 0 to 1\n" in section
    power = reference.explain("schedule.power", config, found)
    assert power.splitlines()[0] == "schedule.power = 1.0    from: preset x"
    assert power.endswith("    float above 0; default 1.0")
    for wrong, near in (("schedule.powr", "schedule.power"), ("lr", "optimizer.lr"), ("shedule", "schedule")):
        with pytest.raises(ValueError, match=rf"no such section or key; did you mean {near}\?"):
            reference.explain(wrong, config, found)
