"""Line charts as SVG text: no fonts embedded, no scripts, sharp in print and at any width."""

from __future__ import annotations

import math
from html import escape

from .document import Bars, Chart

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 70, 28, 16, 56
STYLES = (("#1f4e79", ""), ("#b45f06", "7 4"), ("#38761d", "2 3"), ("#741b47", "9 3 2 3"))
"""Colour and dash of each series; the dashes tell them apart in black and white."""


def render_chart(chart: Chart) -> str:
    """An ``<svg>`` element, or an empty string where there is nothing finite to draw."""
    series = [(name, [(x, y) for x, y in points if math.isfinite(y)]) for name, points in chart.series]
    series = [(name, points) for name, points in series if points]
    if not series:
        return ""
    xs = [math.log10(x) if chart.log_x else x for _, points in series for x, _ in points]
    ys = [y for _, points in series for _, y in points] + ([chart.limit[1]] if chart.limit else [])
    x_low, x_high = min(xs), max(xs)
    if x_low == x_high:
        x_high = x_low + 1
    y_ticks = ticks(min(0.0, *ys), max(ys))
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        across = ((math.log10(x) if chart.log_x else x) - x_low) / (x_high - x_low)
        up = (y - y_low) / (y_high - y_low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}" class="chart" '
        'xmlns="http://www.w3.org/2000/svg">'
    ]
    for tick in y_ticks:
        _, y = place(10**x_low if chart.log_x else x_low, tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for value, label in _x_ticks(chart, x_low, x_high):
        x, _ = place(value, y_low)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 22}" text-anchor="middle">{label}</text>')
    if chart.limit:
        _, y = place(10**x_low if chart.log_x else x_low, chart.limit[1])
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="limit"/>')
        label = f"{escape(chart.limit[0])} {chart.limit[1]:g}"
        parts.append(
            f'<text x="{WIDTH - RIGHT - 4}" y="{y - 6:.1f}" text-anchor="end" class="limit-label">{label}</text>'
        )
    for (_, points), (color, dash) in zip(series, STYLES):
        path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dashes}/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(chart.x_label)}</text>')
    height = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'x="16" y="{height}" text-anchor="middle" transform="rotate(-90 16 {height})"'
    parts.append(f"<text {turned}>{escape(chart.y_label)}</text>")
    parts.append("</svg>")
    return "".join(parts)


def render_bars(bars: Bars) -> str:
    """An ``<svg>`` of horizontal bars, the last one (the upper limit) in another colour."""
    finite = [value for _, value in bars.rows if math.isfinite(value)]
    longest = max([*finite, 1e-9])
    row = 56
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {row * len(bars.rows)}" role="img" aria-label="{escape(bars.title)}" class="chart" '
        'xmlns="http://www.w3.org/2000/svg">'
    ]
    for index, (label, value) in enumerate(bars.rows):
        top = index * row
        width = max(2.0, (min(value, longest) / longest) * WIDTH)
        color = STYLES[0][0] if index == len(bars.rows) - 1 else STYLES[1][0]
        parts.append(f'<text x="0" y="{top + 19}">{escape(label)}</text>')
        parts.append(f'<rect x="0" y="{top + 26}" width="{width:.1f}" height="14" fill="{color}"/>')
    parts.append("</svg>")
    return "".join(parts)


def legend(chart: Chart) -> list[tuple[str, str, str]]:
    """(name, colour, dashes) of each named series that is drawn."""
    drawn = [name for name, points in chart.series if any(math.isfinite(y) for _, y in points)]
    return [(name, color, dash) for name, (color, dash) in zip(drawn, STYLES) if name]


def ticks(low: float, high: float) -> list[float]:
    """Round values that span [low, high]."""
    if high <= low:
        high = low + 1
    raw = (high - low) / 5
    power = 10 ** math.floor(math.log10(raw))
    step = next(f * power for f in (1, 2, 2.5, 5, 10) if f * power >= raw - 1e-12)
    first = math.floor(low / step)
    count = math.ceil(high / step - 1e-9) - first
    return [round((first + i) * step, 12) for i in range(count + 1)]


def _x_ticks(chart: Chart, low: float, high: float) -> list[tuple[float, str]]:
    if chart.log_x:
        return [
            (10.0**e, f'10<tspan dy="-0.4em" font-size="75%">{e}</tspan>')
            for e in range(math.ceil(low - 1e-9), int(high // 1) + 1)
        ]
    return [(tick, f"{tick:,g}") for tick in ticks(low, high) if low <= tick <= high]
