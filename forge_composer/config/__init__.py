"""The config of a run: one schema, TOML files, dotted overrides, and rules that are checked before a run.

Importing this package loads neither torch nor Monarch.
"""

from forge_composer.config.checks import find_problems
from forge_composer.config.errors import ConfigError, Problem
from forge_composer.config.load import Loaded, Origin, dump_toml, load, read
from forge_composer.config.schema import Config

__all__ = [
    "Config",
    "ConfigError",
    "Loaded",
    "Origin",
    "Problem",
    "dump_toml",
    "find_problems",
    "load",
    "read",
]
