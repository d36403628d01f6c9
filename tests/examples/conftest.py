import json
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "examples" / "ernie_chnsenticorp"
sys.path.insert(0, str(RECIPE))


@pytest.fixture(scope="session")
def mini():
    import mini_corpus

    return mini_corpus.generate()


@pytest.fixture
def small_folder(tmp_path, mini):
    return write_small_folder(tmp_path, mini)


def write_small_folder(parent, mini):
    """train/dev/test.tsv with 300/60/60 rows of `mini`, three repeats, and one text under both labels."""
    folder = parent / "data"
    folder.mkdir()
    for name, size in (("train", 300), ("dev", 60), ("test", 60)):
        rows = mini[name][:size]
        if name == "train":
            text, label = rows[10]
            rows = [*rows, rows[0], rows[0], rows[1], (text, 1 - label)]
        if name == "test":
            rows = [*rows[:-1], mini["train"][5]]
        lines = "".join(f"{label}\t{text}\n" for text, label in rows)
        (folder / f"{name}.tsv").write_text("label\ttext_a\n" + lines, encoding="utf-8")
    return folder


@pytest.fixture
def run(small_folder, tmp_path, capsys, monkeypatch):
    def start(*flags, data=small_folder, output=tmp_path / "run", outputs=False):
        """With the quickest accountant, and the report only where it is asked for: they take most of a small run."""
        if not outputs:
            monkeypatch.setattr("outputs.write_outputs", lambda *run: [])
        where = [] if "--resume" in flags else ["--data", str(data), "--output", str(output), "--accountant", "rdp"]
        import train

        code = train.main([*where, *map(str, flags)])
        captured = capsys.readouterr()
        return code, output, captured.out + captured.err

    return start


@pytest.fixture
def begun(monkeypatch):
    """What each training starts from: weights, averages, learning rate, steps. Not that of stage 1."""
    import loop
    import staged  # noqa: F401 - takes hold of the loop before it is replaced

    train, seen = loop.train, []

    def remembering(args, task, training, *rest):
        seen.append(
            {
                "weights": [p.numpy().copy() for p in task.trained_parameters],
                "averages": [] if training.average is None else [a.numpy().copy() for a in training.average.average],
                "averaged": 0 if training.average is None else training.average.steps,
                "rate": training.optimizer.get_lr(),
                "steps": training.steps_taken,
            }
        )
        ended = train(args, task, training, *rest)
        seen[-1]["after"] = [p.numpy().copy() for p in task.trained_parameters]
        return ended

    monkeypatch.setattr(loop, "train", remembering)
    return seen


def read(folder, name):
    return json.loads((folder / name).read_text(encoding="utf-8"))


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
