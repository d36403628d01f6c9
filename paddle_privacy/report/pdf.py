"""The report as PDF: printed by a Chromium-like browser where one is installed, else drawn by matplotlib."""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import subprocess
import tempfile
import textwrap
import unicodedata
from pathlib import Path
from typing import Any

from .document import Bars, Bullets, Chart, Code, Document, Paragraph, Table
from .html import render_html

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge")
CJK_FONTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Source Han Sans SC", "WenQuanYi Micro Hei")
_PAGE = (8.27, 11.69)


def write_pdf(document: Document, path: str | os.PathLike[str], browser: str | None = None) -> str:
    """Writes the PDF and says what made it: the browser's name, or "matplotlib".

    Args:
        document: the report.
        path: of the PDF.
        browser: command of a Chromium-like browser; "" never uses one; None looks for one.
    """
    found = next(filter(None, map(shutil.which, BROWSERS)), None) if browser is None else browser
    if found and _print(found, document, Path(path)):
        return os.path.basename(found)
    _draw(document, path)
    return "matplotlib"


def _print(browser: str, document: Document, path: Path) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "report.html"), Path(folder, "report.pdf")
        source.write_text(render_html(document), encoding="utf-8")
        # The page is our own text without scripts; root (containers) cannot have Chromium's sandbox.
        sandbox = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        options = [
            "--headless",
            "--disable-gpu",
            "--no-pdf-header-footer",
            f"--user-data-dir={folder}/profile",
            *sandbox,
        ]
        try:
            subprocess.run(
                [browser, *options, f"--print-to-pdf={target}", source.as_uri()],
                capture_output=True,
                timeout=120,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return False
        if not target.is_file() or not target.stat().st_size:
            return False
        shutil.copyfile(target, path)
        return True


def _draw(document: Document, path: str | os.PathLike[str]) -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "a PDF report needs Chromium or matplotlib; install one, e.g.: pip install 'paddle-privacy[cli]'"
        ) from error
    # fontTools tells every glyph it embeds to whoever has turned on INFO logging.
    logging.getLogger("fontTools").setLevel(logging.WARNING)
    from matplotlib import font_manager
    from matplotlib.backends.backend_pdf import PdfPages

    fonts = ["DejaVu Sans"]
    if document.language.startswith("zh"):
        known = {font.name for font in font_manager.fontManager.ttflist}
        usable = [font for font in CJK_FONTS if font in known]
        if not usable:
            raise RuntimeError(
                "no font with Chinese characters was found; install fonts-noto-cjk or Chromium, or write HTML instead"
            )
        fonts = [usable[0], *fonts]
    with matplotlib.rc_context({"font.family": fonts}), PdfPages(path) as pages:
        _Pages(pages, document).draw()


class _Pages:
    """A cursor that moves down A4 pages, in inches from the top."""

    def __init__(self, pages: Any, document: Document) -> None:
        self.pages, self.document = pages, document
        self.figure: Any = None
        self.y = 0.0
        self.columns = 46 if document.language.startswith("zh") else 92

    def draw(self) -> None:
        document = self.document
        self.turn()
        self.write(document.title, size=17, weight="bold", columns=45)
        self.write(document.subtitle, size=8)
        self.y += 0.1
        self.write(document.verdict, size=12, weight="bold")
        self.write(document.integrity)
        self.table(Table((), tuple(document.tiles)))
        for section in document.sections:
            self.y += 0.18
            self.write(section.title, size=13, weight="bold", keep=0.8)
            for block in section.blocks:
                if isinstance(block, Paragraph):
                    self.write(block.text.replace("**", ""))
                elif isinstance(block, Bullets):
                    for item in block.items:
                        self.write("•  " + item.replace("**", ""))
                elif isinstance(block, Code):
                    self.write(block.text, size=7, columns=110)
                elif isinstance(block, Table):
                    self.table(block)
                elif isinstance(block, Chart):
                    self.chart(block)
                elif isinstance(block, Bars):
                    self.bars(block)
        self.finish()

    def turn(self) -> None:
        from matplotlib.figure import Figure

        if self.figure is not None:
            self.finish()
        self.figure, self.y = Figure(figsize=_PAGE), 0.8

    def finish(self) -> None:
        self.pages.savefig(self.figure)

    def room(self, inches: float) -> None:
        if self.y + inches > _PAGE[1] - 0.8:
            self.turn()

    def write(
        self, text: str, size: float = 9.5, weight: str = "normal", x: float = 0.8, columns: int = 0, keep: float = 0.0
    ) -> None:
        line_height = size * 1.5 / 72
        self.room(line_height + keep)
        for paragraph in text.split("\n"):
            for line in _wrap(paragraph, columns or self.columns):
                self.room(line_height)
                self.y += line_height
                self.figure.text(x / _PAGE[0], 1 - self.y / _PAGE[1], _plain(line), fontsize=size, fontweight=weight)
        self.y += 0.04

    def table(self, table: Table) -> None:
        if table.caption:
            self.write(table.caption, weight="bold", keep=0.4)
        columns = max(len(row) for row in table.rows)
        width = (_PAGE[0] - 1.6) / columns
        share = int(self.columns / columns) - 2
        for row in ([table.head] if table.head else []) + list(table.rows):
            cells = [_wrap(cell, share) for cell in row]
            height = max(map(len, cells)) * 0.19
            self.room(height)
            for column, lines in enumerate(cells):
                for index, line in enumerate(lines):
                    x, y = 0.8 + column * width, self.y + (index + 1) * 0.185
                    weight = "bold" if row is table.head else "normal"
                    self.figure.text(x / _PAGE[0], 1 - y / _PAGE[1], _plain(line), fontsize=8.5, fontweight=weight)
            self.y += height + 0.03
        self.y += 0.08

    def chart(self, chart: Chart) -> None:
        self.room(3.0)
        self.write(chart.title, weight="bold")
        bottom = 1 - (self.y + 2.45) / _PAGE[1]
        axes = self.figure.add_axes((1.3 / _PAGE[0], bottom + 0.4 / _PAGE[1], 6.1 / _PAGE[0], 1.95 / _PAGE[1]))
        for name, points in chart.series:
            axes.plot([x for x, _ in points], [y for _, y in points], label=name or None)
        if chart.log_x:
            axes.set_xscale("log")
        if chart.limit:
            axes.axhline(chart.limit[1], linestyle="--", color="firebrick", label=chart.limit[0])
        axes.set_xlabel(chart.x_label, fontsize=8)
        axes.set_ylabel(chart.y_label, fontsize=8)
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
        self.y += 2.6

    def bars(self, bars: Bars) -> None:
        self.write(bars.title, weight="bold", keep=0.4 * len(bars.rows))
        longest = max([value for _, value in bars.rows if math.isfinite(value)] + [1e-9])
        for label, value in bars.rows:
            self.write(label, size=8.5)
            width = max(0.02, min(value, longest) / longest * (_PAGE[0] - 1.6))
            axes = self.figure.add_axes(
                (0.8 / _PAGE[0], 1 - (self.y + 0.12) / _PAGE[1], width / _PAGE[0], 0.1 / _PAGE[1])
            )
            axes.set_axis_off()
            axes.axhspan(0, 1, color="steelblue")
            self.y += 0.2


def _wrap(text: str, columns: int) -> list[str]:
    """Lines of at most ``columns`` characters, wide characters counted twice when the text has any."""
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    if wide * 4 > len(text):
        return [text[i : i + columns] for i in range(0, len(text), columns)]
    return textwrap.wrap(text, columns * 2 if wide and columns < 60 else columns) or [""]


def _plain(text: str) -> str:
    """Superscripts as characters; matplotlib must not take ``$`` for mathematics."""
    raised = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    return re.sub(r"10\^(-?\d+)", lambda match: "10" + match[1].translate(raised), text).replace("$", r"\$")
