"""A run folder with targets, as a run leaves it: config, trace and `targets.jsonl`, for the tiny policy."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

from forge_composer.config import dump_toml, read
from forge_composer.hints.records import Target
from forge_composer.hints.samples import write_targets
from forge_composer.rendering.renderer import ChatRenderer
from forge_composer.traces.store import TraceWriter
from forge_composer.types import Rollout
from tests.traces.rollout_fixtures import make_rollout

CHECKOUT = Path(__file__).resolve().parents[2]
POLICY = CHECKOUT / "assets" / "tiny_policy"
HINT = "Hint: this body is right:\nreturn a + b"
ATTACK = "</pre><script>alert(1)</script> & \x1b[31mred\u202e"
"""What a page must escape and a terminal must not obey."""


def wrote(body: str) -> str:
    arguments = json.dumps({"name": "write_body", "arguments": {"body": body}}, ensure_ascii=False)
    return f"<tool_call>\n{arguments}\n</tool_call>"


@functools.cache
def renderer() -> ChatRenderer:
    return ChatRenderer.from_folder(POLICY)


def failed(number: int, *bodies: str) -> Rollout:
    """A rollout of writing turns without success."""
    return make_rollout(number, renderer=renderer(), script=[wrote(body) for body in bodies], reward=0.0)


def rollouts() -> list[Rollout]:
    found = [failed(0, "return a - b", "return b"), failed(1, "return 1 // 0", "ü ✓"), failed(2, ATTACK)]
    return [*found, failed(3, "return a * b", "pass")]


def targets(members: Sequence[Rollout]) -> list[tuple[int, Target]]:
    """(step, target): two kinds, two sources, three steps."""
    first, second, third, fourth = (rollout.rollout_id for rollout in members)
    return [
        (1, Target(first, 1, "test_failed", HINT, "sibling")),
        (1, Target(second, 0, "test_failed", "Hint: an earlier attempt failed: got -1", "feedback", 0.5)),
        (2, Target(third, 0, "low_reward", f"Hint: {ATTACK}", "sibling")),
        (3, Target(fourth, 1, "low_reward", "Hint: be brief.", "feedback")),
    ]


def make_run(folder: Path, *overrides: str, pairs: Sequence[tuple[int, Target]] | None = None) -> Path:
    """Write the folder; `pairs` replaces the targets."""
    arguments = ("--loss.sdpo.weight", "0.5", "--model.path", str(POLICY), *overrides)
    config = read(CHECKOUT / "configs" / "cpu_sync.toml", arguments).config
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(dump_toml(config), encoding="utf-8")
    members = rollouts()
    with TraceWriter(folder / "traces" / "train.jsonl") as writer:
        for rollout in members:
            writer.append(rollout)
    for step, target in targets(members) if pairs is None else pairs:
        write_targets(folder / "targets.jsonl", step, [target])
    return folder
