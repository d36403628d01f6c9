"""The table of gradient rules in docs/layers.md: ``python -m paddle_privacy.gradients.layers_table docs/layers.md``."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from paddle_privacy.gradients.rules import registry
from paddle_privacy.gradients.rules.recurrent import FUSED

BEGIN, END = "<!-- rules: generated -->", "<!-- rules: end -->"


def table() -> str:
    """One line a rule: the layers, what it computes, ties, AMP, recompute."""
    head = ["| layer | how | ties | AMP | recompute |", "|---|---|---|---|---|"]
    return "\n".join([*head, *_ruled(), _recurrent()])


def with_table(page: str) -> str:
    """The page with everything between its two markers replaced by :func:`table`."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


def _ruled() -> list[str]:
    by_rule: dict[registry.GradRule, list[str]] = {}
    for cls, rule in registry._by_type.items():
        if cls.__module__.startswith("paddle."):
            by_rule.setdefault(rule, []).append(f"`nn.{cls.__name__}`")
    for name, rule in registry._by_name.items():
        by_rule.setdefault(rule, []).append(f"`{name.split('.')[-1]}` ({name.split('.')[0]})")
    return [_row(layers, inspect.getdoc(rule.factors) or "") for rule, layers in by_rule.items()]


def _recurrent() -> str:
    how = (
        "Paddle's kernel forward, one layer and direction at a time; a backward that hands out the gradients of the "
        "gates. Several layers, both directions, `time_major`, `sequence_length`, initial states, dropout, projection."
    )
    return _row([f"`nn.{cls.__name__}`" for cls in FUSED], how)


def _row(layers: list[str], how: str) -> str:
    first = how.split("\n\n")[0].replace("\n", " ").replace("|", "\\|").replace("``", "`")
    return f"| {', '.join(layers)} | {first} | exact | yes | yes |"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")
