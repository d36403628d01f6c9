"""The document as Markdown; charts become small tables of their values."""

from __future__ import annotations

from .document import Bars, Bullets, Chart, Code, Document, Paragraph, Section, Table, number

CHART_ROWS = 12


def render_markdown(document: Document) -> str:
    """GitHub-flavoured Markdown text."""
    lines = [f"# {document.title}", "", document.subtitle, "", f"**{document.verdict}**  ", document.integrity, ""]
    lines += _table(Table((), tuple(document.tiles)))
    for section in document.sections:
        lines += _section(section)
    return "\n".join(lines).rstrip() + "\n"


def _section(section: Section) -> list[str]:
    lines = [f"## {section.title}", ""]
    for block in section.blocks:
        if isinstance(block, Paragraph):
            lines += [("> " if block.tone else "") + block.text, ""]
        elif isinstance(block, Bullets):
            lines += [*(f"- {item}" for item in block.items), ""]
        elif isinstance(block, Code):
            lines += ["```", block.text, "```", ""]
        elif isinstance(block, Table):
            lines += _table(block)
        elif isinstance(block, Chart):
            lines += _chart(block)
        elif isinstance(block, Bars):
            lines += [f"**{block.title}**", "", *(f"- {label}" for label, _ in block.rows), ""]
    return lines


def _table(table: Table) -> list[str]:
    columns = max(len(row) for row in table.rows)
    head = table.head or ("",) * columns
    align = ["---"] + (["---:"] if table.numeric else ["---"]) * (columns - 1)
    lines = [f"**{table.caption}**", ""] if table.caption else []
    lines += [_row(head), _row(tuple(align)), *(_row(row) for row in table.rows), ""]
    return lines


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _chart(chart: Chart) -> list[str]:
    names = [name or chart.y_label for name, _ in chart.series]
    columns = [dict(points) for _, points in chart.series]
    places = sorted({x for points in columns for x in points})
    stride = max(1, -(-len(places) // CHART_ROWS))
    chosen = sorted({*places[::stride], *places[-1:]})
    rows = tuple((number(x if chart.log_x else int(x)), *(number(points.get(x)) for points in columns)) for x in chosen)
    return _table(Table((chart.x_label, *names), rows, chart.title, numeric=True))
