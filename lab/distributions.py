"""What a workload draws from: length distributions and arrival processes, as validated parts of its YAML schema.

Every class here is a key of the file: unknown keys, wrong types and values out of range are refused while loading.
A draw is a function of its generator alone. The trace of the request class is handed to every draw; those that do not
replay it ignore it.
"""

import difflib
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from lab.traces import TraceRequest

Trace = Sequence[TraceRequest]
Count = Annotated[int, Field(strict=True, ge=1)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]


class WorkloadError(ValueError):
    """A workload file that does not follow the schema, or requests that cannot be built or served."""


def invalid(message: str, **values: Any) -> PydanticCustomError:
    """An error of the schema: `message` names the values, what they must be, and what to change."""
    return PydanticCustomError("invalid", message, values)


class Schema(BaseModel):
    """A mapping in the file: immutable, and a key it does not know is an error that lists those it does."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for key in data:
                if key not in cls.model_fields:
                    near = difflib.get_close_matches(str(key), cls.model_fields, 1)
                    raise invalid(
                        "unknown key {key}; {remedy}known keys: {known}",
                        key=repr(key),
                        remedy=f"did you mean {near[0]!r}? " if near else "",
                        known=", ".join(cls.model_fields),
                    )
        return data


# ---------------------------------------------------------------------------------------------------- lengths, tokens


class FixedLength(Schema):
    """Every length is `value`."""

    distribution: Literal["fixed"]
    value: Count

    def sample(self, count: int, rng: np.random.Generator, trace: Trace) -> np.ndarray:
        return np.full(count, self.value, np.int64)


class UniformLength(Schema):
    """Whole numbers from `low` to `high`, both included."""

    distribution: Literal["uniform"]
    low: Count
    high: Count

    @model_validator(mode="after")
    def _ordered(self) -> "UniformLength":
        return _ordered(self)

    def sample(self, count: int, rng: np.random.Generator, trace: Trace) -> np.ndarray:
        return rng.integers(self.low, self.high, size=count, endpoint=True)


class LognormalLength(Schema):
    """`median * exp(sigma * N(0, 1))`, rounded, and clipped to `low`..`high`."""

    distribution: Literal["lognormal"]
    median: Positive
    sigma: Positive
    low: Count = 1
    high: Count

    @model_validator(mode="after")
    def _ordered(self) -> "LognormalLength":
        return _ordered(self)

    def sample(self, count: int, rng: np.random.Generator, trace: Trace) -> np.ndarray:
        drawn = self.median * np.exp(self.sigma * rng.standard_normal(count))
        return np.clip(np.rint(drawn), self.low, self.high).astype(np.int64)


class ChoiceLength(Schema):
    """One of `values`, equally likely or in proportion to `weights`."""

    distribution: Literal["choice"]
    values: tuple[Count, ...] = Field(min_length=1)
    weights: tuple[Positive, ...] | None = None

    @model_validator(mode="after")
    def _weight_each(self) -> "ChoiceLength":
        if self.weights is not None and len(self.weights) != len(self.values):
            raise invalid(
                "{weights} weights for {values} values; give each value one weight, or no weights at all",
                weights=len(self.weights),
                values=len(self.values),
            )
        return self

    def sample(self, count: int, rng: np.random.Generator, trace: Trace) -> np.ndarray:
        return rng.choice(np.array(self.values, np.int64), size=count, p=_shares(self.weights))


class MixtureLength(Schema):
    """Each length comes from one of `components`, chosen in proportion to their weights."""

    distribution: Literal["mixture"]
    components: tuple["Component", ...] = Field(min_length=1)

    def sample(self, count: int, rng: np.random.Generator, trace: Trace) -> np.ndarray:
        chosen = rng.choice(len(self.components), size=count, p=_shares([c.weight for c in self.components]))
        # Each component draws for every request, so that one component's draws do not depend on the others' weights.
        drawn = np.stack([component.length.sample(count, rng, trace) for component in self.components])
        return drawn[chosen, np.arange(count)]


Length = Annotated[
    FixedLength | UniformLength | LognormalLength | ChoiceLength | MixtureLength, Field(discriminator="distribution")
]


class Component(Schema):
    """A part of a mixture."""

    weight: Positive
    length: Length


class TraceLength(Schema):
    """The output lengths of the class's trace."""

    distribution: Literal["trace"]

    def sample(self, count: int, rng: np.random.Generator, trace: Trace) -> np.ndarray:
        return np.array([request.num_output_tokens for request in trace[:count]], np.int64)


OutputLength = Annotated[
    FixedLength | UniformLength | LognormalLength | ChoiceLength | MixtureLength | TraceLength,
    Field(discriminator="distribution"),
]


_Bounded = TypeVar("_Bounded", "UniformLength", "LognormalLength")


def _ordered(length: _Bounded) -> _Bounded:
    if length.low > length.high:
        raise invalid("low is {low}, must be at most high, {high}; swap them", low=length.low, high=length.high)
    return length


def _shares(weights: Sequence[float] | None) -> np.ndarray | None:
    return None if weights is None else np.array(weights) / np.sum(weights)


# ---------------------------------------------------------------------------------------- arrivals, seconds from start


class AtOnce(Schema):
    """Every request arrives at `start_s`."""

    process: Literal["at_once"]
    start_s: NonNegative = 0.0

    def sample(self, count: int, rng: np.random.Generator, trace: Trace) -> np.ndarray:
        return np.full(count, self.start_s)


class Poisson(Schema):
    """Exponential gaps at `rate` requests a second, the first one after `start_s`."""

    process: Literal["poisson"]
    rate: Positive
    start_s: NonNegative = 0.0

    def sample(self, count: int, rng: np.random.Generator, trace: Trace) -> np.ndarray:
        return self.start_s + np.cumsum(rng.exponential(1 / self.rate, count))


class Gamma(Schema):
    """Gamma gaps: `rate` requests a second, coefficient of variation `cv` (1 is Poisson, more is burstier)."""

    process: Literal["gamma"]
    rate: Positive
    cv: Positive
    start_s: NonNegative = 0.0

    def sample(self, count: int, rng: np.random.Generator, trace: Trace) -> np.ndarray:
        shape = 1 / self.cv**2
        return self.start_s + np.cumsum(rng.gamma(shape, 1 / (self.rate * shape), count))


class Times(Schema):
    """The arrivals themselves, one for each request of the class."""

    process: Literal["times"]
    times_s: tuple[NonNegative, ...] = Field(min_length=1)

    def sample(self, count: int, rng: np.random.Generator, trace: Trace) -> np.ndarray:
        if len(self.times_s) != count:
            raise WorkloadError(
                f"arrival.times_s has {len(self.times_s)} times for {count} requests; give each its own"
            )
        return np.array(self.times_s)


class TraceArrivals(Schema):
    """The arrivals of the class's trace, each multiplied by `time_scale` (below 1 makes the load heavier)."""

    process: Literal["trace"]
    time_scale: Positive = 1.0
    start_s: NonNegative = 0.0

    def sample(self, count: int, rng: np.random.Generator, trace: Trace) -> np.ndarray:
        return self.start_s + self.time_scale * np.array([request.arrival_s for request in trace[:count]])


Arrival = Annotated[AtOnce | Poisson | Gamma | Times | TraceArrivals, Field(discriminator="process")]
