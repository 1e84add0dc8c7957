"""Run as a process of its own: asks 20 questions at once and prints each answer; a test kills it.

Usage: ask_twenty.py URL LEDGER BUDGET
"""

from __future__ import annotations

import asyncio
import sys

from forge_composer.teachers.ledger import Ledger
from forge_composer.teachers.pool import TeacherPool
from tests.teachers.endpoint import ask, teacher


async def main(url: str, path: str, budget: float) -> None:
    with Ledger(path, budget_usd=budget) as ledger:
        async with TeacherPool([teacher(url, retry={"attempts": 1})], ledger) as pool:

            async def one(number: int) -> None:
                (reply,) = await pool.ask(ask(f"q{number}"))
                print(f"q{number}", reply.kind.value, flush=True)

            await asyncio.gather(*(one(number) for number in range(20)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
