"""A report on what a model's training spent, for people who were not there."""

from __future__ import annotations

import json
import os
from pathlib import Path

from .document import build_document
from .facts import Facts, Tuning, collect
from .text import LANGUAGES

FORMATS = ("html", "md", "json", "pdf")

__all__ = ["FORMATS", "LANGUAGES", "Facts", "Tuning", "collect", "write_report"]


def write_report(facts: Facts, path: str | os.PathLike[str], format: str | None = None, language: str = "en") -> str:
    """Writes the report and returns its format.

    Args:
        facts: from :func:`collect`.
        path: of the report.
        format: "html", "md", "json" or "pdf"; by the path's suffix when None.
        language: "en" or "zh" (JSON is the same in both).

    Raises:
        ValueError: an unknown format or language.
        ImportError: jinja2 (html) or matplotlib (pdf without a browser) is not installed.
    """
    chosen = format or {".htm": "html", ".markdown": "md"}.get(Path(path).suffix, Path(path).suffix[1:])
    if chosen not in FORMATS:
        raise ValueError(f"format is {chosen!r}; it must be one of {', '.join(FORMATS)}")
    document = build_document(facts, language)
    if chosen == "json":
        Path(path).write_text(json.dumps(facts.to_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    elif chosen == "md":
        from .markdown import render_markdown

        Path(path).write_text(render_markdown(document), encoding="utf-8")
    elif chosen == "pdf":
        from .pdf import write_pdf

        write_pdf(document, path)
    else:
        from .html import render_html

        Path(path).write_text(render_html(document), encoding="utf-8")
    return chosen
