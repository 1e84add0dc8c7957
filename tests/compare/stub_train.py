"""Stands in for the training command: takes its arguments, checks them as it does, leaves a run folder.

The learning curve rises to `loss.sdpo.weight` + 0.3 with a little noise of the seed. Environment variables,
`arm/seed-S`, make a run misbehave: STUB_SLEEP waits until it is interrupted, STUB_FAIL ends with an error.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from forge_composer.config import dump_toml, load

config = load(Path(sys.argv[2]), sys.argv[3:])
folder = config.output_dir
folder.mkdir(parents=True)
(folder / "config.toml").write_text(dump_toml(config))
(folder / "pid").write_text(str(os.getpid()))
where = f"{folder.parent.name}/{folder.name}"
with (folder.parents[1] / "started.txt").open("a") as started:
    started.write(f"{where}\n")


def interrupted(*_: object) -> None:
    with (folder.parents[1] / "interrupts.txt").open("a") as file:
        file.write(f"{where}\n")
    time.sleep(0.3)  # an orderly end takes a moment, in which a second signal would be seen
    (folder / "summary.json").write_text(json.dumps({"status": "interrupted", "reason": None, "rollouts": 0}))
    sys.exit(130)


signal.signal(signal.SIGINT, interrupted)
if os.environ.get("STUB_SLEEP") == where:
    (folder / "metrics.jsonl").write_text("")
    time.sleep(60)
if os.environ.get("STUB_FAIL") == where:
    sys.exit("the stub was told to fail")

noise = random.Random(config.seed)
goal = 0.3 + config.loss.sdpo.weight
with (folder / "metrics.jsonl").open("w") as metrics:
    for step in range(1, config.loop.steps + 1):
        value = goal * step / config.loop.steps + noise.uniform(0, 0.01)
        record = {"kind": "step", "step": step, "reward/success_rate": value}
        record |= {"rollout/count": 16.0, "time/step_s": 1.0}
        metrics.write(json.dumps(record) + "\n")
    record = {"kind": "eval", "step": config.loop.steps, "eval/reward_success_rate": goal}
    record |= {"eval/scored": 128.0, "eval/count": 128.0}
    metrics.write(json.dumps(record) + "\n")
total = 16 * config.loop.steps + 128
(folder / "summary.json").write_text(json.dumps({"status": "completed", "reason": None, "rollouts": total}))
