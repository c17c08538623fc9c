"""Values of sampling parameters for tests, from the table of parameters, so that tests include new ones."""

from typing import Any

from hypothesis import strategies as st

from tgi.microkernel.messages.sampling_params import NEUTRAL, PARAMETERS, RANGES, Range, SamplingParams


def accepted(name: str) -> list[Any]:
    """Non-neutral values of a parameter: its examples, and the bounds of its range."""
    parameter = PARAMETERS[name]
    values = [field.example for field in (parameter.native, parameter.openai) if field is not None]
    if name in RANGES:
        values += [RANGES[name].minimum, RANGES[name].maximum]
    return [value for value in dict.fromkeys(values) if value not in (None, NEUTRAL[name])]


def refused(limits: Range) -> list[float]:
    """Values just outside a range."""
    found: list[float] = []
    if limits.above is not None:
        found += [limits.above, limits.above - 1]
    if limits.minimum is not None:
        found.append(limits.minimum - 1)
    if limits.maximum is not None:
        found.append(limits.maximum + 1)
    return found


def parameter_values(name: str) -> st.SearchStrategy[Any]:
    """The neutral value, as often as all others together."""
    values = accepted(name)
    return st.sampled_from([NEUTRAL[name]] * len(values) + values)


def sampling_params(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[SamplingParams]:
    """Records with these fields; the others have their neutral values."""
    strategies = {"seed": st.integers(0, 2**64 - 1)} | fields
    return st.fixed_dictionaries(strategies).map(lambda values: SamplingParams(**values))


def all_sampling_params(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[SamplingParams]:
    """Records with these fields; the other parameters have values from the table."""
    return sampling_params(**{name: parameter_values(name) for name in PARAMETERS} | fields)
