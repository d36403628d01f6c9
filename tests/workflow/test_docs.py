"""The Python of docs/from_opacus.md, run in order as one program."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from paddle.io import TensorDataset

PAGE = Path(__file__).parents[2] / "docs" / "from_opacus.md"


def test_the_migration_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    images = np.random.RandomState(0).randn(300, 1, 8, 8).astype("float32")
    names = {"dataset": TensorDataset([images, np.random.RandomState(1).randint(0, 4, 300)])}
    programs = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S)
    assert len(programs) == 2
    for program in programs:
        exec(compile(program, str(PAGE), "exec"), names)
    said = capsys.readouterr().out.splitlines()
    assert 0 < float(said[0]) < float(said[1]) <= 3.0
    assert said[2].startswith("resumed after epoch 2")


def test_the_facts_of_the_table():
    """The rate at N=100, B=64."""
    from paddle.io import DataLoader

    from paddle_privacy.engine import poisson_loader
    from paddle_privacy.sampling import detect_sampling

    for drop_last in (False, True):
        loader = DataLoader(TensorDataset([np.zeros((100, 1))]), batch_size=64, shuffle=True, drop_last=drop_last)
        private = poisson_loader(loader, detect_sampling(loader), None)
        assert private.batch_sampler.sample_rate == 0.64
        assert len(private) == len(loader)
