"""Both READMEs: the programs run in order, and they are the same programs; what they link to exists."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from paddle.io import DataLoader, TensorDataset

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "README.zh-CN.md"]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.S)


@pytest.fixture(scope="module")
def dataset():
    rng = np.random.default_rng(0)
    return TensorDataset([rng.normal(size=(512, 784)).astype("float32"), rng.integers(0, 10, 512)])


def test_the_programs_run(dataset, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"dataset": dataset, "dataloader": DataLoader(dataset, batch_size=256, shuffle=True)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for program in blocks("README.md", "python"):
            exec(compile(program, "README.md", "exec"), names)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("Epoch 0: ε=") and said[99].startswith("Epoch 99: ε=")
    assert "PrivacySpent(epsilon=" in said[100]
    assert 0 < float(said[101]) < 20
    assert (tmp_path / "ledger.jsonl").stat().st_size > 0


def test_the_two_languages_hold_the_same_programs_and_commands():
    def without_comments(text: str) -> list[str]:
        return [line.split("  #")[0].split("    #")[0].rstrip() for line in text.splitlines()]

    for language in ("python", "bash"):
        english, chinese = (list(map(without_comments, blocks(page, language))) for page in PAGES)
        assert english == chinese


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    missing = [link for link in re.findall(r"\]\(([^)#:]+)\)", text) if not (ROOT / link).exists()]
    assert not missing


def test_every_command_exists():
    from paddle_privacy.cli import COMMANDS

    used = set(re.findall(r"^paddle-privacy (\S+)", "\n".join(blocks("README.md", "bash")), flags=re.M))
    assert used == set(COMMANDS) - {"export"}
