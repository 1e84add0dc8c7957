"""A generation engine in a process of its own, which runs the scenarios that tests send to it.

vLLM changes settings of its whole process, so it must not be started in the one that runs the tests.
Run as a script: `engine_host.py ADDRESS`.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import cloudpickle

from forge_composer.config.schema import GeneratorConfig, ModelConfig
from forge_composer.generation.engine import GenerationEngine

Scenario = Callable[..., Awaitable[Any]]


class EngineHost:
    """The test's end: `run(scenario, *args)` runs `await scenario(engine, *args)` over there."""

    def __init__(self, model: Path, checkout: Path, **config: Any) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        environment.pop("VLLM_LOGGING_LEVEL", None)
        self.listener = Listener(family="AF_UNIX")
        command = [sys.executable, __file__, self.listener.address]
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.connection: Connection = self.listener.accept()
        self.connection.send((model, config))
        self.start_seconds: float = self._answer()

    def run(self, scenario: Scenario, *args: Any) -> Any:
        cloudpickle.register_pickle_by_value(sys.modules[scenario.__module__])
        self.connection.send_bytes(cloudpickle.dumps((scenario, args)))
        return self._answer()

    def _answer(self) -> Any:
        if not self.connection.poll(120):
            self.process.kill()
            raise TimeoutError(f"the engine process did not answer: {self.process.communicate()[0][-3000:]}")
        try:
            ok, value = self.connection.recv()
        except EOFError:
            raise RuntimeError(f"the engine process died: {self.process.communicate()[0][-3000:]}") from None
        if not ok:
            raise value
        return value

    def close(self) -> str:
        """End the process; returns what it printed."""
        self.connection.close()
        self.listener.close()
        try:
            return self.process.communicate(timeout=60)[0]
        finally:
            self.process.kill()


def serve(address: str) -> None:
    connection = Client(address, family="AF_UNIX")
    model, config = connection.recv()
    with asyncio.Runner() as runner:
        engine = GenerationEngine(ModelConfig(path=model), GeneratorConfig(**config), device="cpu", seed=0)
        try:
            connection.send((True, runner.run(engine.start())))
        except Exception as error:
            connection.send((False, error))
            return
        while True:
            try:
                scenario, args = cloudpickle.loads(connection.recv_bytes())
            except EOFError:
                break
            try:
                connection.send((True, runner.run(scenario(engine, *args))))
            except Exception as error:
                connection.send((False, error))
        runner.run(engine.close())


if __name__ == "__main__":
    serve(sys.argv[1])
