"""Everything that is said about an experiment: from its run folders to files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from forge_composer._files import write_whole
from forge_composer.compare.analysis import compare
from forge_composer.compare.curves import read_run, run_status
from forge_composer.compare.experiment import Experiment
from forge_composer.compare.output import Account, as_json, markdown
from forge_composer.compare.page import render_page
from forge_composer.compare.runs import Planned
from forge_composer.compare.verdict import notes, verdict
from forge_composer.config import Config


def make_account(
    experiment: Experiment, runs: Sequence[Planned], configs: Mapping[str, Config], *, parallel: int
) -> Account:
    """Compare what is finished.

    Args:
        experiment: the experiment.
        runs: all of its runs, finished or not.
        configs: the run config of each arm.
        parallel: runs that were started at a time.

    Raises:
        ValueError: a finished run has no values of the metric that counts as success.
    """
    completed = [run for run in runs if run.completed]
    results = {
        arm.name: [
            read_run(run.folder, run.seed, experiment.success) for run in completed if run.arm == arm.name
        ]
        for arm in experiment.arms
    }
    comparison = compare(experiment, results)
    missing = []
    for run in runs:
        if run not in completed:
            status, reason = run_status(run.folder)
            missing.append({"arm": run.arm, "seed": run.seed, "status": status, "reason": reason})
    return Account(
        comparison,
        verdict(comparison),
        notes(comparison, missing=len(missing), parallel=parallel, configs=configs),
        missing,
    )


def write_account(account: Account, *, results: Path, page: Path) -> Path:
    """Write the results as JSON, the tables beside them as Markdown, and the page, each whole or not at all.

    Returns:
        The path of the tables.
    """
    tables = results.with_suffix(".md")
    text = json.dumps(as_json(account), indent=1, allow_nan=False) + "\n"
    for path, content in ((results, text), (tables, markdown(account)), (page, render_page(account))):
        write_whole(path, content)
    return tables
