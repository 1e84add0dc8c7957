"""Hosting an OpenEnv environment in this process: `python -m forge_composer.envs.server` ends up here.

`feature_deletion` is ours; any other name is `package.module:EnvironmentClass`.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
import threading
import typing
from collections.abc import Callable, Mapping
from typing import Any

from openenv.core.env_server import (
    Action,
    ConcurrencyConfig,
    Environment,
    Observation,
    State,
    create_app,
)
from pydantic import ValidationError

OURS = "feature_deletion"


class EnvironmentNameError(ValueError):
    """The environment's name or options do not lead to an OpenEnv environment."""


def build_app(name: str, options: Mapping[str, Any], *, max_sessions: int) -> Any:
    """The OpenEnv application (FastAPI) that serves an environment.

    Args:
        name: `feature_deletion` or `package.module:EnvironmentClass`.
        options: `FeatureDeletionOptions` fields, or keyword arguments of the class.
        max_sessions: most sessions at once; a class that does not declare SUPPORTS_CONCURRENT_SESSIONS
            gets one.

    Raises:
        EnvironmentNameError: the name cannot be imported, is no Environment, or the options do not fit.
        SandboxUnavailableError: this machine cannot confine model-written code (`feature_deletion`).
    """
    if name == OURS:
        return _feature_deletion_app(options, max_sessions)
    cls = import_environment(name)
    action, observation, state = environment_types(cls)
    sessions = max_sessions if cls.SUPPORTS_CONCURRENT_SESSIONS else 1
    factory: Callable[[], Any] = (lambda: cls(**options)) if options else cls
    return _app(factory, action, observation, state, name.rpartition(":")[2], sessions)


def _feature_deletion_app(options: Mapping[str, Any], max_sessions: int) -> Any:
    from forge_composer.envs import feature_deletion as fd

    try:
        checked = fd.FeatureDeletionOptions(**options)
    except ValidationError as error:
        raise EnvironmentNameError(f"options of feature_deletion: {error}") from error
    sandbox = fd.shared_sandbox(checked)  # fails here, before a client waits for it

    def factory() -> fd.FeatureDeletionEnvironment:
        return fd.FeatureDeletionEnvironment(checked, sandbox)

    return _app(
        factory,
        fd.FeatureDeletionAction,
        fd.FeatureDeletionObservation,
        fd.FeatureDeletionState,
        OURS,
        max_sessions,
    )


def _app(
    factory: Callable[[], Any], action: type, observation: type, state: type, name: str, sessions: int
) -> Any:
    # No session timeout: OpenEnv's closes environments under live sockets that are merely idle.
    concurrency = ConcurrencyConfig(max_concurrent_envs=sessions, session_timeout=None)
    return create_app(
        factory, action, observation, env_name=name, state_cls=state, concurrency_config=concurrency
    )


def import_environment(name: str) -> Any:
    """The class that `package.module:EnvironmentClass` names.

    Raises:
        EnvironmentNameError: with what is wrong.
    """
    module_name, colon, class_name = name.partition(":")
    if not (module_name and colon and class_name):
        raise EnvironmentNameError(
            f"environment {name!r}: expected {OURS!r} or 'package.module:EnvironmentClass'"
        )
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise EnvironmentNameError(f"environment {name!r}: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, Environment)):
        raise EnvironmentNameError(f"environment {name!r} is not a subclass of OpenEnv's Environment")
    return cls


def environment_types(cls: Any) -> tuple[type, type, type]:
    """Action, observation and state class: the arguments of `Environment[...]` among the class's bases.

    A class that leaves them out is asked through the annotations of `step` and `state`.
    """
    for base in cls.__mro__:
        for generic in getattr(base, "__orig_bases__", ()):
            arguments = typing.get_args(generic)
            if len(arguments) == 3 and all(isinstance(argument, type) for argument in arguments):
                return arguments[0], arguments[1], arguments[2]
    hints = typing.get_type_hints(cls.step)
    action, observation = hints.get("action"), hints.get("return")
    if not (_is_kind(action, Action) and _is_kind(observation, Observation)):
        raise EnvironmentNameError(
            f"{cls.__qualname__}: its action and observation types are unknown; derive it from "
            "Environment[ItsAction, ItsObservation, ItsState] or annotate step"
        )
    assert isinstance(action, type)
    assert isinstance(observation, type)
    return action, observation, State


def _is_kind(value: Any, kind: type) -> bool:
    return isinstance(value, type) and issubclass(value, kind)


def serve(app: Any, *, host: str, port: int, log_level: str = "warning") -> None:
    """Serve until SIGTERM."""
    import uvicorn

    uvicorn.run(app, host=host, port=port, log_level=log_level, ws_ping_interval=None)


def end_with_parent() -> None:
    """End this process when its parent ends: the parent holds the other end of our standard input.

    PR_SET_PDEATHSIG would do it when the parent's *thread* ends, which is not what is meant; the parent's
    pid is watched as well, in case a sibling has inherited the pipe.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            readable = select.select([sys.stdin], [], [], 1.0)[0]
            if readable and not os.read(sys.stdin.fileno(), 1024):
                break
        os.kill(os.getpid(), signal.SIGKILL)  # nothing to save; the sandbox dies with us

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
