"""What the local teachers are: skill, latency, price; and which faults the server shows on purpose."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError, model_validator

from forge_composer._section import Section

LOCAL_URL = "http://local/v1"
"""`base_url` of a teacher that a command or a run serves itself."""

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Style = Literal["plain", "indented", "quoted"]
Table = TypeVar("Table", bound=Section)

FAULT_KINDS = (
    "rate_limit",
    "server_error",
    "hang",
    "disconnect",
    "truncated",
    "wrong_schema",
    "bad_arguments",
    "length",
    "refusal",
    "bad_usage",
)
"""Every fault the server can show; each is a field of `FaultRates`."""


class ScriptedTeacher(Section):
    """One model of the server."""

    name: str
    """Model name, as requests give it."""
    family: str
    """Models of one family share the states of `shared_bias` and their wrong answer there."""
    skill: Share = 0.8
    """Probability that a first attempt is right."""
    correction_skill: Share | None = None
    """Probability that an attempt after a failed test is right; None: `skill`."""
    shared_bias: Share = 0.0
    """Share of states on which every model of the family gives one and the same wrong answer."""
    alternatives: PositiveInt = 15
    """Different wrong bodies that the model picks from, each equally likely."""
    style: Style = "plain"
    """How a body is spelled. `indented`: as deep as it stands in the module. `quoted`: single quotes."""
    latency_s: NonNegativeFloat = 1.0
    """Median time of an answer in seconds, before the server's `latency_scale`."""
    latency_spread: NonNegativeFloat = 0.5
    """Standard deviation of the time's logarithm; the 95th percentile is `latency_s * exp(1.645 spread)`."""
    input_usd_per_million: NonNegativeFloat = 1.0
    """Price of a million prompt tokens."""
    output_usd_per_million: NonNegativeFloat = 5.0
    """Price of a million completion tokens."""


class FaultRates(Section):
    """How often an answer is spoiled, by kind. At most one fault falls on an answer, so the rates add up."""

    rate_limit: Share = 0.0
    """Status 429 with a `Retry-After` header."""
    server_error: Share = 0.0
    """Status 500."""
    hang: Share = 0.0
    """No answer for `hang_s`, then the connection is closed."""
    disconnect: Share = 0.0
    """The connection is closed at once."""
    truncated: Share = 0.0
    """Status 200 with the first half of the JSON."""
    wrong_schema: Share = 0.0
    """Status 200 with JSON that is no chat completion: an empty list of choices, another object, an error."""
    bad_arguments: Share = 0.0
    """A tool call whose arguments are not JSON."""
    length: Share = 0.0
    """Finish reason `length`, the tool call cut off."""
    refusal: Share = 0.0
    """The model declines: a `refusal` and no call."""
    bad_usage: Share = 0.0
    """A good answer whose `usage` is missing, negative or of the wrong type."""
    retry_after_s: NonNegativeFloat = 1.0
    """Value of `Retry-After`, seconds; a fraction is sent as it is."""
    hang_s: PositiveFloat = 600.0
    """How long a hanging request is kept open, seconds."""

    @model_validator(mode="after")
    def _rates_leave_room(self) -> FaultRates:
        if self.total > 1.0 + 1e-9:
            raise ValueError(
                f"the rates of all faults add up to {self.total:g}, and an answer has one fault at most: "
                "lower them to a sum of 1"
            )
        return self

    @property
    def total(self) -> float:
        """Share of answers with a fault."""
        return float(sum(getattr(self, kind) for kind in FAULT_KINDS))


class FaultPlan(Section):
    """Fault rates of all models and of single ones; a model's table replaces only the fields that it sets."""

    default: FaultRates = FaultRates()
    """Rates of every model that has no table of its own."""
    models: dict[str, FaultRates] = Field(default_factory=dict)
    """Rates by model name."""

    def rates(self, model: str) -> FaultRates:
        """The rates that hold for a model."""
        own = self.models.get(model)
        return self.default if own is None else _merged(self.default, own)

    @model_validator(mode="after")
    def _merged_rates_leave_room(self) -> FaultPlan:
        for own in self.models.values():
            _merged(self.default, own)
        return self


def _merged(default: FaultRates, own: FaultRates) -> FaultRates:
    return FaultRates(**(default.model_dump() | own.model_dump(include=own.model_fields_set)))


DEFAULT_TEACHERS = (
    ScriptedTeacher(
        name="scripted/strong",
        family="strong",
        skill=0.9,
        latency_s=9.0,
        input_usd_per_million=3.0,
        output_usd_per_million=15.0,
    ),
    ScriptedTeacher(
        name="scripted/medium",
        family="medium",
        skill=0.8,
        style="indented",
        latency_s=5.0,
        input_usd_per_million=1.25,
        output_usd_per_million=10.0,
    ),
    ScriptedTeacher(
        name="scripted/weak",
        family="weak",
        skill=0.65,
        style="quoted",
        latency_s=2.0,
        input_usd_per_million=0.3,
        output_usd_per_million=1.2,
    ),
)
"""Latencies of the size that paid endpoints have: the slowest's 95th percentile is 20.5 s."""


class TeacherServerConfig(Section):
    """The whole server."""

    seed: int = 0
    """Fixes every answer, latency and fault."""
    latency_scale: NonNegativeFloat = 0.01
    """Factor on all latencies; 0 answers at once, 1 takes the time that paid endpoints take."""
    report_cost: bool = True
    """Give `usage.cost`, as OpenRouter does; without it clients need a price table."""
    teachers: tuple[ScriptedTeacher, ...] = DEFAULT_TEACHERS
    """The models."""
    faults: FaultPlan = FaultPlan()
    """Faults that are shown on purpose."""

    @model_validator(mode="after")
    def _names_fit(self) -> TeacherServerConfig:
        names = [teacher.name for teacher in self.teachers]
        if not names:
            raise ValueError("teachers: at least one is needed")
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"teachers: {', '.join(doubled)} occurs more than once; give each its own name")
        if unknown := sorted(set(self.faults.models) - set(names)):
            raise ValueError(
                f"faults.models: there is no teacher {unknown[0]!r}; there are {', '.join(names)}"
            )
        return self


class ServerFileError(ValueError):
    """A TOML file of the local server that cannot be used; the message names file, field and remedy."""


def load_faults(path: Path) -> FaultPlan:
    """Read a fault plan: `[default]` and `[models."NAME"]`, each with the fields of `FaultRates`.

    Raises:
        ServerFileError: no such file, no TOML, an unknown or wrong field.
    """
    return _load(path, FaultPlan)


def load_server(path: Path) -> TeacherServerConfig:
    """Read a server's config: the fields of `TeacherServerConfig`, with one `[[teachers]]` table a model.

    Raises:
        ServerFileError: no such file, no TOML, an unknown or wrong field.
    """
    return _load(path, TeacherServerConfig)


def _load(path: Path, kind: type[Table]) -> Table:
    try:
        return kind.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ServerFileError(
            f"{path}: cannot be read ({error.strerror or error}); name an existing file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ServerFileError(f"{path}: is not valid TOML ({error}); mend the line") from None
    except ValidationError as error:
        raise ServerFileError("\n".join(_words(path, problem, kind) for problem in error.errors())) from None


def _words(path: Path, problem: Any, kind: type[Section]) -> str:
    field = ".".join(str(part) for part in problem["loc"])
    where = f"{path}: {field}" if field else str(path)
    if problem["type"] == "extra_forbidden":
        known = ", ".join(
            FaultRates.model_fields if "faults" in field or kind is FaultPlan else kind.model_fields
        )
        return f"{where}: there is no such field; there are {known}"
    return f"{where}: {problem['msg'].removeprefix('Value error, ')}"
