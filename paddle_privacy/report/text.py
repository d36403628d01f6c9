"""The report's sentences; ``text.<language>.json`` holds them, same keys and placeholders in each."""

from __future__ import annotations

import functools
import json
from pathlib import Path

LANGUAGES = ("en", "zh")


@functools.cache
def texts(language: str) -> dict[str, str]:
    """All sentences of one language, with ``{placeholders}``.

    Raises:
        ValueError: a language that the report does not speak.
    """
    if language not in LANGUAGES:
        raise ValueError(f"language is {language!r}; it must be one of {', '.join(LANGUAGES)}")
    return json.loads(Path(__file__).with_name(f"text.{language}.json").read_text(encoding="utf-8"))


def text(language: str, key: str, **values: object) -> str:
    """One sentence, filled in."""
    return texts(language)[key].format(**values)
