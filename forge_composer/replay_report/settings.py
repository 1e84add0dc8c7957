"""The config of `apps.replay_teachers`; its `replay` and `teachers` are those of a run's config."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveInt

from forge_composer._section import Section
from forge_composer.config.replay import ReplayConfig
from forge_composer.config.teachers import TeacherConfig
from forge_composer.teachers.local.settings import TeacherServerConfig

TraceFormatName = Literal["auto", "run", "atif", "chat", "verifiers", "swe_agent"]


class ReplaySettings(Section):
    """One replay of recorded traces to teachers."""

    name: str = Field("replay", min_length=1)
    """Title of tables and page."""
    traces: tuple[Path, ...] = ()
    """Trace files, folders of them, or run folders; looked up in the current folder, then beside the config.
    `--traces` replaces them."""
    format: TraceFormatName = "auto"
    """How they are written. `auto` finds it out; `run` reads our own traces as rollouts, with what the
    environment said about each step (docs/traces.md has the others)."""
    output_dir: Path = Path("runs/{name}")
    """Folder of ledger, numbers, page and pairs; `{name}` stands for the name. A second run in it asks only
    for what is missing."""
    policy: Path | None = None
    """Hugging Face folder of the policy that pairs are tokenised for; None: pairs of text."""
    projection_traces: PositiveInt = 1000
    """Traces that cost and time are projected to."""
    replay: ReplayConfig = Field(default_factory=ReplayConfig)
    """Steps, quorum, pairs, budget, limits."""
    teachers: tuple[TeacherConfig, ...] = ()
    """The teachers (array of tables)."""
    local_teachers: TeacherServerConfig | None = None
    """Scripted teachers that are served during the run; a teacher with `base_url = "http://local/v1"` is one
    of them. None: none are."""

    @property
    def concurrency(self) -> dict[str, int]:
        """Calls at once that each teacher takes, by name."""
        return {teacher.name: teacher.concurrency for teacher in self.teachers}
