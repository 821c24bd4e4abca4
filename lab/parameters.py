"""A notebook's parameters: read from its cell tagged ``parameters``, checked before anything runs.

papermill only warns of an unknown parameter and hands ``-p quick true`` over as the text "true"; here both are settled
before a kernel starts.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_SCALARS: Mapping[str, type] = {"bool": bool, "int": int, "float": float, "str": str}


class ParameterError(ValueError):
    """An unknown, mistyped or badly declared notebook parameter."""


@dataclass(frozen=True)
class Declared:
    """One declared parameter; ``type_name`` is a scalar's (bool, int, float, str) or ``list[scalar]``."""

    name: str
    type_name: str
    default: str
    help: str


def declared_parameters(notebook: Path) -> dict[str, Declared]:
    """The notebook's parameters by name, types taken from annotations (or from the defaults where there are none).

    Raises :class:`ParameterError` for a file that is no notebook and a declaration whose type is not supported.
    """
    from papermill import inspect_notebook

    try:
        inspected = inspect_notebook(notebook)
    except (ValueError, AttributeError, KeyError) as error:  # nbformat's errors, by how the file is broken
        raise ParameterError(f"{notebook} is no notebook that can be read ({type(error).__name__}: {error})") from error
    declared = {}
    for name, found in inspected.items():
        type_name = found["inferred_type_name"].replace(" ", "")
        if type_name == "None":
            type_name = _type_of_default(found["default"])
        element = type_name.removeprefix("list[").removesuffix("]")
        if element not in _SCALARS:
            raise ParameterError(
                f"{notebook}: parameter {name} is declared as {type_name!r}; "
                f"supported are {', '.join(_SCALARS)} and list[...] of them"
            )
        declared[name] = Declared(name, type_name, found["default"], found["help"])
    return declared


def check_parameters(notebook: Path, given: Mapping[str, object]) -> dict[str, Any]:
    """``given`` with text parsed to the declared types, ready for papermill.

    Raises :class:`ParameterError` naming the parameter, the value and what would be accepted.
    """
    if not given:
        return {}
    declared = declared_parameters(notebook)
    if unknown := sorted(set(given) - set(declared)):
        known = ", ".join(declared) or "none"
        raise ParameterError(f"{notebook.name} has no parameter {', '.join(unknown)}; its parameters: {known}")
    return {name: _convert(declared[name], value) for name, value in given.items()}


def effective(notebook: Path, checked: Mapping[str, Any], name: str) -> Any:
    """The value ``name`` will have in the run: as given, else its literal default, else None."""
    if name in checked:
        return checked[name]
    declared = declared_parameters(notebook).get(name)
    if declared is None:
        return None
    try:
        return ast.literal_eval(declared.default)
    except (ValueError, SyntaxError) as error:
        raise ParameterError(f"{notebook}: give parameter {name} a plain default, not {declared.default}") from error


def _type_of_default(default: str) -> str:
    try:
        value = ast.literal_eval(default)
    except (ValueError, SyntaxError):
        return "an expression"
    if isinstance(value, list):
        kinds: Sequence[str] = sorted({type(item).__name__ for item in value})
        return f"list[{kinds[0]}]" if len(kinds) == 1 else "list of mixed or no items"
    return type(value).__name__


def _convert(declared: Declared, value: object) -> Any:
    type_name = declared.type_name
    try:
        if not type_name.startswith("list["):
            return _scalar(type_name, value)
        items = ast.literal_eval(value) if isinstance(value, str) else value
        if not isinstance(items, list):
            raise ValueError
        return [_scalar(type_name[5:-1], item) for item in items]
    except (ValueError, SyntaxError, KeyError) as error:
        example = {"bool": "true or false", "int": "8", "float": "0.5"}.get(type_name, "[1, 2]")
        raise ParameterError(
            f"parameter {declared.name} takes {type_name} (such as {example}; default {declared.default}), "
            f"not {value!r}"
        ) from error


def _scalar(type_name: str, value: object) -> bool | int | float | str:
    """``value`` as the named type: text is parsed, other values must already be of the type. Raises ``ValueError``."""
    wanted = _SCALARS[type_name]
    if isinstance(value, str) and wanted is not str:
        value = TRUTH[value.strip().lower()] if wanted is bool else wanted(value)
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted or not isinstance(value, bool | int | float | str):
        raise ValueError
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError
    return value
