"""A whole run: meshes up, controller, export, meshes down, and a summary however it ends."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Iterator

from forge_composer.actors.meshes import Meshes
from forge_composer.config import Config
from forge_composer.hints.context import TeacherContexts
from forge_composer.loop import Controller
from forge_composer.parts import Parts
from forge_composer.recorder import RunRecorder
from forge_composer.rendering.renderer import ChatRenderer
from forge_composer.rollout.episode import EpisodeRunner, TokenLimits
from forge_composer.types import Message


class Run:
    """One run of one config. `recorder` exists from the start, so that nothing that happens is lost."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.recorder = RunRecorder(config)
        self.meshes = Meshes(config)

    async def train(self) -> None:
        """Train to the end. However it ends, the processes are stopped and the summary is written.

        Raises:
            Exception: what ended the run; the reason has been reported.
            asyncio.CancelledError: the run was interrupted.
        """
        try:
            await self._train()
        except asyncio.CancelledError:
            self.recorder.close("interrupted")
            raise
        except BaseException as error:
            reasons = [f"{type(leaf).__name__}: {leaf}" for leaf in leaves(error)]
            (self.recorder.folder / "error.txt").write_text(
                "".join(traceback.format_exception(error)) + "\n".join(self.meshes.runtime.faults),
                encoding="utf-8",
            )
            self.recorder.close("failed", "; ".join(dict.fromkeys(reasons)))
            raise
        self.recorder.close("completed")

    async def _train(self) -> None:
        if self.config.teachers and self.config.loss.replay_dpo.weight == 0:
            self.recorder.warn(
                "teachers are configured and not asked: loss.replay_dpo.weight is 0, the channel is off"
            )
        renderer = await asyncio.to_thread(ChatRenderer.from_folder, self.config.model.path)
        report = renderer.is_prefix_preserving()
        if not (report.tool_calls and report.thinking):
            self.recorder.warn(
                "the chat template rewrites earlier turns (thinking, as a rule): those episodes become "
                "several training samples"
            )
        self._check_hints(renderer)
        self.recorder.phase("starting the processes")
        async with self.meshes as meshes:
            self.recorder.started(meshes.start_seconds)
            parts = Parts(
                trainer=meshes.trainer,
                generators=meshes.generators,
                environments=meshes.environments,
                buffer=meshes.buffer,
                runner=EpisodeRunner(renderer, meshes.environments, self.config.rollout, self._limits()),
                recorder=self.recorder,
                teachers=meshes.teachers,
                pairs=meshes.pairs,
            )
            await Controller(self.config, parts).run()
            if self.config.trainer.export_hf:
                self.recorder.phase("writing the final policy")
                await meshes.trainer.export_hf(self.recorder.folder / "checkpoints" / "final_hf")

    def _check_hints(self, renderer: ChatRenderer) -> None:
        """Raise ValueError if the chat template cannot show a hint where it is configured to stand."""
        if self.config.loss.sdpo.weight == 0:
            return
        position = self.config.hints.position
        contexts = TeacherContexts(renderer, position, max_tokens=self.config.trainer.seq_len)
        chat = [Message(role="system", content="You fix code."), Message(role="user", content="Begin.")]
        problem = contexts.supported(chat, [])
        if problem is not None:
            raise ValueError(f"hints.position = {position!r}: {problem}; set another position")

    def _limits(self) -> TokenLimits:
        return TokenLimits(
            max_turn_tokens=self.config.generator.sampling.max_turn_tokens,
            max_prompt_tokens=self.config.rollout.max_prompt_tokens,
            max_completion_tokens=self.config.rollout.max_completion_tokens,
            max_model_len=self.config.generator.max_model_len,
        )

    async def shutdown(self) -> None:
        """End Monarch in this process, for good."""
        await self.meshes.runtime.shutdown()


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors inside nested exception groups."""
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from leaves(member)
    else:
        yield error
