"""Sentences about invalid settings, in the terms of the file and not of the validating library.

Owns the wording that every settings file shares: which kind of value is needed, which bounds hold,
and which known name is probably meant.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

from pydantic_core import ErrorDetails

MAX_SHOWN_CHARACTERS = 60
"""Characters of an invalid value that are shown."""


def nearest(name: str, known: Iterable[str], form: str = "'{}'") -> str:
    """Return the end of a sentence about an unknown name: the nearest known one, or all of them."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {form.format(near[0])}?"
    return f"; it may have {', '.join(names)}"


def _plain(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else str(bound)


_WHOLE = "must be a whole number"
_RULES: dict[str, Callable[[dict[str, Any]], str]] = {
    "int_type": lambda _: _WHOLE,
    "int_from_float": lambda _: _WHOLE,
    "int_parsing_size": lambda _: "must be a smaller number",
    "float_type": lambda _: "must be a number",
    "finite_number": lambda _: "must be a finite number",
    "bool_type": lambda _: "must be true or false",
    "string_type": lambda _: "must be text in quotes",
    "tuple_type": lambda _: "must be a list, like []",
    "literal_error": lambda context: f"must be {context['expected']}",
    "greater_than_equal": lambda context: f"must be at least {_plain(context['ge'])}",
    "greater_than": lambda context: f"must be more than {_plain(context['gt'])}",
    "less_than_equal": lambda context: f"must be at most {_plain(context['le'])}",
    "less_than": lambda context: f"must be less than {_plain(context['lt'])}",
    "string_unicode": lambda _: "must be text in UTF-8",
    "string_too_short": lambda context: f"must have at least {context['min_length']} character",
    "string_too_long": lambda context: f"must have at most {context['max_length']} characters",
    "string_pattern_mismatch": lambda _: (
        "must be an address that begins with https://, http://, s3://, gs:// or "
        "hf://datasets/OWNER/NAME"
    ),
    "multiple_of": lambda context: f"must be a multiple of {_plain(context['multiple_of'])}",
    "model_type": lambda _: "must be a table, like {}",
    "extra_forbidden": lambda _: "must be left out",
    "too_short": lambda context: f"must have at least {context['min_length']} part",
    "too_long": lambda context: f"must have at most {context['max_length']} parts",
    "value_error": lambda context: f"{context['error']}",
}


def describe_setting_error(detail: ErrorDetails) -> str:
    """Describe what the value must be, and what it is."""
    rule = _RULES.get(detail["type"])
    context = dict(detail.get("ctx") or {})
    wanted = rule(context) if rule else f"is not accepted ({detail['msg']}); it is"
    shown = repr(detail["input"])
    if len(shown) >= MAX_SHOWN_CHARACTERS:
        shown = shown[: MAX_SHOWN_CHARACTERS - 3] + "..."
    return f"{wanted}, not {shown}"
