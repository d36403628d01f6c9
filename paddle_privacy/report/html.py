"""One self-contained HTML file: system fonts, inline style and charts, nothing loaded from anywhere."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from .chart import legend, render_bars, render_chart
from .document import Document


def render_html(document: Document) -> str:
    """The document as HTML5 text."""
    try:
        import jinja2
    except ImportError as error:
        raise ImportError("an HTML report needs jinja2; install it with: pip install 'paddle-privacy[cli]'") from error
    import markupsafe

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters.update(
        kind=lambda block: type(block).__name__,
        rich=lambda text: markupsafe.Markup(_rich(text)),
        powers=lambda text: markupsafe.Markup(_powers(escape(text))),
        bars=lambda block: markupsafe.Markup(render_bars(block)),
        chart=lambda block: markupsafe.Markup(render_chart(block)),
        legend=legend,
    )
    template = Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8")
    return environment.from_string(template).render(document=document) + "\n"


def _rich(text: str) -> str:
    return _powers(re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", escape(text)))


def _powers(text: str) -> str:
    return re.sub(r"\b(10|e)\^(-?\d+|ε)", r"\1<sup>\2</sup>", text)
