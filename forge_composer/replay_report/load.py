"""From a TOML file and overrides to `ReplaySettings`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from forge_composer.config.errors import ConfigError
from forge_composer.config.load import filled_in, here_or_beside, read_table
from forge_composer.replay_report.rules import contradictions
from forge_composer.replay_report.settings import ReplaySettings


def load_settings(path: str | Path, arguments: Sequence[str] = ()) -> ReplaySettings:
    """Read, override and check the config of a replay; starts nothing and looks at no trace.

    Args:
        path: TOML file.
        arguments: dotted overrides as on a command line, `["--replay.quorum", "3"]`.

    Returns:
        The settings, with `output_dir`, `policy` and `traces` absolute.

    Raises:
        ConfigError: with every problem that was found.
    """
    settings, _ = read_table(path, arguments, ReplaySettings)
    if problems := contradictions(settings, str(path)):
        raise ConfigError(problems)
    file, policy = Path(path), settings.policy
    return settings.model_copy(
        update={
            "output_dir": filled_in(settings.output_dir, settings.name),
            "policy": None if policy is None else here_or_beside(policy, file),
            "traces": tuple(here_or_beside(trace, file) for trace in settings.traces),
        }
    )
