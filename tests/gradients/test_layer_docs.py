"""docs/layers.md is what the registry says, and the code of docs/custom_layers.md runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paddle_privacy.gradients.layers_table import with_table
from paddle_privacy.gradients.rules import registry

DOCS = Path(__file__).parents[2] / "docs"


def test_the_table_is_up_to_date():
    written = (DOCS / "layers.md").read_text(encoding="utf-8")
    assert written == with_table(written), "run: python -m paddle_privacy.gradients.layers_table docs/layers.md"


def test_every_rule_says_what_it_computes():
    for rule in {*registry._by_type.values(), *registry._by_name.values()}:
        assert rule.factors.__doc__, f"{rule.factors.__name__} has no docstring, so its row in docs/layers.md is empty"


@pytest.mark.parametrize(
    "block", re.findall(r"```python\n(.*?)```", (DOCS / "custom_layers.md").read_text("utf-8"), re.S)
)
def test_the_examples_run(block, capsys):
    known = dict(registry._by_type)
    try:
        exec(compile(block, "docs/custom_layers.md", "exec"), {"__name__": "example"})
    finally:
        registry._by_type.clear()
        registry._by_type.update(known)
    printed = capsys.readouterr().out
    assert "agrees with one-by-one autograd" in printed or "[8, 4, 2]" in printed
