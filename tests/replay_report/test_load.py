"""The config of a replay: the shipped ones load, and what is wrong is named with file, field and remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge_composer.config import ConfigError
from forge_composer.config.fields import leaves
from forge_composer.replay_report.load import load_settings
from forge_composer.replay_report.settings import ReplaySettings
from tests.replay_report.small_replays import config_of, teacher, write_config


@pytest.mark.parametrize("name", ["replay_offline", "teachers_openrouter", "teachers_vllm"])
def test_shipped_configs(checkout: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkout)
    settings = load_settings(f"configs/{name}.toml")
    families = {each.family_name for each in settings.teachers}
    assert len(families) == len(settings.teachers) >= settings.replay.quorum == 2
    assert all(path.exists() for path in settings.traces)


def test_openrouter_has_prices_and_no_key(checkout: Path) -> None:
    settings = load_settings(checkout / "configs/teachers_openrouter.toml")
    assert {each.family_name for each in settings.teachers} == {"anthropic", "openai", "google"}
    for each in settings.teachers:
        assert each.price is not None
        assert each.price.output > each.price.input > 0
        assert each.api_key_env == "OPENROUTER_API_KEY"


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    config = config_of(folder) | {"traces": ["traces.jsonl"], "name": "n", "output_dir": "runs/{name}"}
    settings = load_settings(write_config(folder, config))
    assert settings.traces == (folder / "traces.jsonl",)
    assert settings.output_dir == tmp_path / "runs/n"


def test_overrides_are_typed(tmp_path: Path) -> None:
    path = write_config(tmp_path, config_of(tmp_path))
    arguments = (
        "--replay.budget.run_usd 2e-1 --teachers.1.concurrency=3 --name 12 --replay.steps every "
        "--local_teachers.latency-scale 0.5 --local_teachers.report_cost=false --policy none"
    )
    settings = load_settings(path, arguments.split())
    assert settings.replay.budget.run_usd == 0.2
    assert settings.teachers[1].concurrency == 3
    assert (settings.name, settings.replay.steps, settings.policy) == ("12", "every", None)
    assert settings.local_teachers is not None
    assert settings.local_teachers.latency_scale == 0.5
    assert settings.local_teachers.report_cost is False


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tracs": []}, r"replay\.toml: tracs = \[\].*no such field.*did you mean traces\?"),
    ({"replay": {"quorun": 2}}, r"replay\.quorun.*did you mean replay\.quorum\?"),
    ({"quorum": 2}, r"quorum = 2.*did you mean replay\.quorum\?"),
    ({"teachers": [teacher("weak", pric=1)]}, r"teachers\.0\.pric.*did you mean teachers\.0\.price\?"),
    ({"replay": {"concurrency": 0}}, r"replay\.concurrency = 0.*greater than 0"),
    ({"projection_traces": "many"}, r"projection_traces = .many.*remedy"),
    ({"teachers": []}, r"there is no teacher to ask.*\[\[teachers\]\]"),
    ({"teachers": [teacher("weak"), teacher("weak")]}, r"two teachers have this name"),
    ({"teachers": [teacher("weak")]}, r"replay\.min_quorum = 2.*1 model families"),
    (
        {"teachers": [teacher("weak", model="x"), teacher("strong")]},
        r"teachers\.0\.model = x.*scripted/strong",
    ),
    ({"replay": {"outcome_gate": "better"}}, r"replay\.outcome_gate.*no environment"),
    ({"replay": {"audit_fraction": 0.5}}, r"replay\.audit_fraction.*set it to 0"),
    ({"replay": {"rendered": "drop"}}, r"replay\.rendered.*keep"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_configs(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write_config(tmp_path, config_of(tmp_path, **changes))
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load_settings(path)


def test_local_teachers_need_their_table_and_their_table_needs_them(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    table = config.pop("local_teachers")
    with pytest.raises(ConfigError, match=r"(?s)teachers\.0\.base_url.*add the table \[local_teachers\]"):
        load_settings(write_config(tmp_path, config))
    other = config_of(tmp_path, url="http://127.0.0.1:9/v1") | {"local_teachers": table}
    with pytest.raises(ConfigError, match=r"(?s)local_teachers.*none is asked"):
        load_settings(write_config(tmp_path, other))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--replay.qorum", "3"], r"command line: replay\.qorum = 3.*did you mean replay\.quorum\?"),
        (["--replay.quorum", "x"], r"command line: replay\.quorum"),
        (["--replay.quorum"], r"the value is missing"),
        (["--replay", "3"], r"this is a table"),
        (["stray"], r"belongs to no option"),
        (["--teachers.7.name", "x"], r"no such table"),
    ],
)
def test_bad_overrides(tmp_path: Path, arguments: list[str], message: str) -> None:
    path = write_config(tmp_path, config_of(tmp_path))
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load_settings(path, arguments)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ends in \.toml"):
        load_settings(tmp_path / "a.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_settings(tmp_path / "a.toml")
    (tmp_path / "a.toml").write_text("name = ")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_settings(tmp_path / "a.toml")


def test_every_field_is_documented_in_the_page(checkout: Path) -> None:
    page = (checkout / "docs/replay.md").read_text(encoding="utf-8")
    own = [name for name, _ in leaves(ReplaySettings) if not name.startswith(("teachers", "local_teachers"))]
    absent = [name for name in own if f"`{name.removeprefix('replay.')}`" not in page]
    assert absent == []
