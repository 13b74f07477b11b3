"""JSON in one canonical form, that of RFC 8785: what is hashed as JSON has the same bytes in every
language.

Whole numbers are below 2^53 (`base.types.MAX_EXACT_INTEGER`); there is no NaN and no infinity. A
ValueError is a bug of this program: every type that is hashed excludes them while it is parsed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import rfc8785


def canonical_json(content: Mapping[str, Any]) -> bytes:
    """Encode `content`, of JSON's types and tuples, by RFC 8785; ValueError for other values."""
    return rfc8785.dumps(dict(content))
