"""Teachers ready to be asked: the ledger of a folder, the scripted ones served, the clients."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from forge_composer.config.teachers import BudgetConfig, TeacherConfig
from forge_composer.teachers.ledger import Ledger
from forge_composer.teachers.local.served import reachable
from forge_composer.teachers.local.settings import TeacherServerConfig
from forge_composer.teachers.pool import TeacherPool

LEDGER = "ledger.sqlite"
"""The ledger's name in the folder of a run or of a replay."""


@asynccontextmanager
async def open_teachers(
    folder: Path,
    teachers: Sequence[TeacherConfig],
    local: TeacherServerConfig | None,
    budget: BudgetConfig,
) -> AsyncIterator[tuple[TeacherPool, Ledger]]:
    """Pool and ledger, as long as the block lasts.

    Args:
        folder: where the ledger is, or will be.
        teachers: who is asked.
        local: the scripted ones among them; None: there are none.
        budget: what may be spent over all openings of the ledger.

    Raises:
        BlockingIOError: another process has the ledger.
        LedgerError: the ledger cannot be used.
        ValueError: a key is not in the environment, or two teachers have one name.
    """
    with Ledger(
        folder / LEDGER, budget_usd=budget.run_usd, budget_usd_per_trace=budget.per_trace_usd
    ) as ledger:
        async with reachable(teachers, local) as found, TeacherPool(found, ledger) as pool:
            yield pool, ledger
