"""What a run leaves behind: config.json, metrics.jsonl, the ledger, the model, and what the user sees meanwhile.

Nothing here is computed from a training row except through the noisy updates. In particular the training loss is
neither shown nor stored: it is a function of the rows that ε does not cover. Loss and accuracy are of the dev rows.
"""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

LEDGER = "ledger.jsonl"
METRICS = "metrics.jsonl"


class RunFolder:
    """Files of one run under ``path``, which must be new or empty unless the run goes on with ``resume``."""

    def __init__(self, path: Path, resume: bool = False) -> None:
        if not resume and path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise FileExistsError(f"--output {path}: exists and is not empty; a run never overwrites another")
        path.mkdir(parents=True, exist_ok=True)
        self.path = path

    @property
    def ledger(self) -> Path:
        return self.path / LEDGER

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (self.path / name).write_text(text + "\n", encoding="utf-8")

    def read_json(self, name: str) -> dict[str, Any]:
        """The file's content; nothing where there is no such file."""
        path = self.path / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def append_metrics(self, record: dict[str, Any]) -> None:
        with (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        path = self.path / METRICS
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []

    def drop_torn_metrics(self) -> None:
        """A killed process may have left half a line, which the next one would be appended to."""
        path = self.path / METRICS
        if path.is_file():
            text = path.read_bytes()
            path.write_bytes(text[: text.rfind(b"\n") + 1])

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint"

    @property
    def model(self) -> Path:
        return self.path / "model"

    def save_model(self, model: Any, tokenizer: Any) -> None:
        model.save_pretrained(str(self.model))
        tokenizer.save_pretrained(str(self.model))


class Progress(AbstractContextManager["Progress"]):
    """A bar of the steps on a terminal, and one line an epoch everywhere."""

    def __init__(self, steps: int, done: int = 0) -> None:
        self._steps, self._done = steps, done
        self._bar: Any = None
        self._task: Any = None
        self._status = ""

    def __enter__(self) -> Progress:
        if sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[status]}"),
            )
            self._bar = Bar(*columns)
            self._bar.start()
            self._task = self._bar.add_task("train", total=self._steps, completed=self._done, status="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self) -> None:
        if self._bar is not None:
            self._bar.update(self._task, advance=1, status=self._status)

    def epoch(
        self, epoch: int, epochs: int, loss: float, accuracy: float, epsilon: float | None, elapsed: float
    ) -> None:
        spent = "" if epsilon is None else f"  ε {epsilon:.3f}"
        self._status = f"loss {loss:.3f}  accuracy {accuracy:.1%}{spent}"
        if self._bar is not None:
            self._bar.update(self._task, status=self._status)
        self.say(f"epoch {epoch}/{epochs}  dev loss {loss:.4f}  dev accuracy {accuracy:.2%}{spent}  {elapsed:.0f} s")

    def say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, flush=True)


def print_table(title: str, rows: list[tuple[str, str]]) -> None:
    """Two columns; drawn with rich on a terminal, aligned plain text elsewhere."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, show_header=False)
        for name, value in rows:
            table.add_row(name, value)
        Console().print(table)
        return
    width = max(len(name) for name, _ in rows)
    print(title)
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")
