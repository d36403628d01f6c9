"""train.py from the command line's arguments to the files of the run, a few real steps each."""

import argparse
import contextlib
import io
import math
import sys

import numpy as np
import pytest
from conftest import lines, read, write_small_folder

from paddle_privacy.accounting import compute_epsilon

PRIVATE = ("--batch-size", "50", "--epochs", "2", "--physical-batch-size", "32")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, mini):
    """One private run with report and plots: its data, its folder and what it printed."""
    import train

    data = write_small_folder(tmp_path_factory.mktemp("finished"), mini)
    folder = data.parent / "run"
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert train.main(["--data", str(data), "--output", str(folder), *PRIVATE]) == 0
    return data, folder, shown.getvalue()


def test_private_run(finished):
    _, folder, shown = finished
    summary, config, metrics = (
        read(folder, "summary.json"),
        read(folder, "config.json"),
        lines(folder / "metrics.jsonl"),
    )

    # 304 rows; three repeats, and both rows of the text with two labels.
    assert config["training_rows"] == 299
    assert "dropped 3 repeats of a text and all 2 rows of 1 texts" in shown
    steps = 2 * math.ceil(299 / 50)
    assert summary["steps"] == config["planned_steps"] == steps
    assert summary["ended"] == "completed"
    assert [m["epoch"] for m in metrics] == [1, 2]

    expected = compute_epsilon(
        noise_multiplier=summary["noise_multiplier"],
        sample_rate=50 / 299,
        steps=steps,
        delta=1e-5,
        accountant=summary["accountant"],
    )
    assert summary["epsilon"] == pytest.approx(expected, rel=1e-9)
    assert summary["epsilon"] <= 3.0
    assert metrics[-1]["epsilon"] == summary["epsilon"] > metrics[0]["epsilon"]
    assert (summary["relation"], summary["sampling"]) == ("add_or_remove_one", "poisson")

    assert (summary["test_rows"], summary["test_rows_unseen"]) == (60, 59)
    for name in ("test accuracy", "unseen in train", "ε", "δ", "σ", "C", "steps", "unit of privacy", "relation"):
        assert name in shown


def test_the_ledger_counts_every_step(finished):
    from paddle_privacy.verify.chain import read_ledger

    _, folder, _ = finished
    (recorded,) = read_ledger(folder / "ledger.jsonl").runs
    assert recorded.steps == 12
    assert recorded.closed
    assert recorded.epsilon[-1] == read(folder, "summary.json")["epsilon"]
    assert recorded.header["dataset_size"] == 299


def test_the_saved_model_is_the_one_that_was_tested(finished, tmp_path):
    import ernie
    import evaluation
    import reviews
    from batches import EncodedRows, pad_tokens

    data, folder, _ = finished
    model, tokenizer = ernie.load(str(folder / "model"), 2, 0.0, tmp_path)
    test = reviews.load(str(data)).test
    rows = EncodedRows(ernie.encode(tokenizer, [text for text, _ in test], 48), [label for _, label in test])
    score = evaluation.evaluate(model, rows, pad_tokens(tokenizer.pad_token_id))
    assert score.accuracy == read(folder, "summary.json")["test_accuracy"]


def test_report_and_plots(finished):
    data, folder, shown = finished
    report = (folder / "report.html").read_text(encoding="utf-8")
    assert f"tiny on {data}" in report
    assert "one row of the training set" in report
    assert "test accuracy" in report
    assert f"{read(folder, 'summary.json')['test_accuracy']:.3g}".rstrip("0") in report
    for name in ("accuracy.png", "epsilon.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    for name in ("report.html", "accuracy.png", "epsilon.png", "ledger.jsonl", "model", "metrics.jsonl"):
        assert name in shown


def test_plots_show_what_the_folder_holds(finished, monkeypatch):
    import outputs
    from run_folder import RunFolder

    _, path, _ = finished
    drawn = {}
    monkeypatch.setattr(outputs, "_line_chart", lambda path, points, *rest, **more: drawn.update({path.name: points}))
    monkeypatch.setattr(outputs, "_report", lambda *run: None)
    args = argparse.Namespace(**read(path, "config.json")["flags"])
    outputs.write_outputs(args, RunFolder(path, resume=True), read(path, "summary.json"))
    metrics = lines(path / "metrics.jsonl")
    assert drawn["accuracy.png"] == [(m["epoch"], 100 * m["dev_accuracy"]) for m in metrics]
    assert [step for step, _ in drawn["epsilon.png"]] == list(range(1, 13))
    assert drawn["epsilon.png"][5][1] == metrics[0]["epsilon"]
    assert drawn["epsilon.png"][11][1] == metrics[1]["epsilon"]


def test_the_non_private_run_learns(run, small_folder):
    # 300 rows are too few to generalise from, so the rows it is judged on are those it learns.
    (small_folder / "dev.tsv").write_text((small_folder / "train.tsv").read_text(encoding="utf-8"), encoding="utf-8")
    code, folder, shown = run("--non-private", "--epochs", "12", "--batch-size", "32")
    assert code == 0
    summary = read(folder, "summary.json")
    assert summary["epsilon"] is None
    assert not (folder / "ledger.jsonl").exists()
    assert "not private" in shown
    assert lines(folder / "metrics.jsonl")[-1]["dev_loss"] < 0.5 * math.log(2)


def test_frozen_layers_do_not_move(run, tmp_path):
    import ernie
    import paddle

    code, folder, _ = run("--freeze-layers", "0", "--batch-size", "50", "--epochs", "1")
    assert code == 0
    paddle.seed(0)
    before, _ = ernie.load("tiny", 2, 0.0, tmp_path / "fresh")
    after, _ = ernie.load(str(folder / "model"), 2, 0.0, tmp_path / "fresh")
    moved = {
        name: not np.array_equal(p.numpy(), q.numpy())
        for (name, p), (_, q) in zip(before.named_parameters(), after.named_parameters())
    }
    assert not any(m for name, m in moved.items() if "embeddings" in name)
    assert all(m for name, m in moved.items() if "embeddings" not in name)


def test_the_head_alone_sees_what_the_whole_model_sees(small_folder, tmp_path):
    """Features computed once, and the same rows through the model, with the same frozen layers: equal scores."""
    import paddle
    import reviews
    import task
    from arguments import parse_arguments

    prepared = {}
    for layers in ("0", "1"):
        args = parse_arguments(["--data", str(small_folder), "--freeze-layers", layers])
        prepared[layers] = task.prepare(args, tmp_path / layers, reviews.load(args.data))
    whole, head = prepared["0"], prepared["1"]
    assert head.network is not head.model
    assert {id(p) for p in head.trained_parameters} < {id(p) for p in head.model.parameters()}
    inputs = [t.join([t.test[row] for row in range(20)])[0] for t in (whole, head)]
    scores = [t.network(*map(paddle.to_tensor, given)).numpy() for t, given in zip((whole, head), inputs)]
    np.testing.assert_allclose(*scores, rtol=1e-5, atol=1e-6)


def test_only_the_head_moves(run, tmp_path):
    import ernie
    import paddle

    code, folder, _ = run("--freeze-layers", "1", "--batch-size", "50", "--epochs", "1")
    assert code == 0
    paddle.seed(0)
    before, _ = ernie.load("tiny", 2, 0.0, tmp_path / "fresh")
    after, _ = ernie.load(str(folder / "model"), 2, 0.0, tmp_path / "fresh")
    for (name, p), (_, q) in zip(before.named_parameters(), after.named_parameters()):
        trained = "pooler" in name or "classifier" in name
        assert np.array_equal(p.numpy(), q.numpy()) != trained, name


def test_automatic_clip_norm_warns_about_private_rows(run, monkeypatch):
    import clip_norm

    monkeypatch.setattr(clip_norm, "ROWS", 40)
    code, folder, shown = run("--clip-norm", "auto", "--batch-size", "50", "--epochs", "1")
    assert code == 0
    assert "was read off the private training rows" in shown
    assert read(folder, "summary.json")["clip_norm"] > 0


def test_automatic_clip_norm_from_public_rows(run, monkeypatch):
    import clip_norm

    monkeypatch.setattr(clip_norm, "ROWS", 20)
    code, folder, shown = run("--clip-norm", "auto", "--clip-norm-data", "mini", "--batch-size", "50", "--epochs", "1")
    assert code == 0
    assert "20 gradient norms" in shown
    assert "private training rows" not in shown


def test_duplicates_can_be_kept(run):
    _, folder, shown = run("--batch-size", "150", "--epochs", "1", "--keep-duplicates")
    assert read(folder, "config.json")["training_rows"] == 304
    assert "the commonest text stands 3 times" in shown
    assert "copies" not in read(folder, "summary.json")["unit"]


def test_three_classes_with_names_of_their_own(run, tmp_path, mini):
    import ernie

    data, names = tmp_path / "topics", ["体育", "科技", "财经"]
    data.mkdir()
    rows = [(names[number % 3], text) for number, (text, _) in enumerate(mini["train"][:240])]
    for split, part in (("train", rows[:180]), ("dev", rows[180:210]), ("test", rows[210:])):
        lines_ = "".join(f"{text}\t{label}\n" for label, text in part)
        (data / f"{split}.tsv").write_text("text\tlabel\n" + lines_, encoding="utf-8")
    code, folder, _ = run("--batch-size", "60", "--epochs", "1", data=data)
    assert code == 0
    config = read(folder, "model/config.json")
    assert {int(number): name for number, name in config["id2label"].items()} == dict(enumerate(sorted(names)))
    model, _ = ernie.load(str(folder / "model"), 3, 0.0, tmp_path / "again")
    assert [model.config.id2label[number] for number in range(3)] == sorted(names)
    assert model.config.label2id == {name: number for number, name in enumerate(sorted(names))}
    assert model.classifier.weight.shape[-1] == 3


def test_a_run_is_complete_without_matplotlib_and_jinja2(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    code, folder, shown = run("--batch-size", "150", "--epochs", "1", outputs=True)
    assert code == 0
    for name in ("report", "accuracy plot", "ε plot"):
        assert f"no {name}: " in shown
    assert read(folder, "summary.json")["ended"] == "completed"
    assert not (folder / "report.html").exists()


def test_an_earlier_run_is_not_overwritten(run):
    run("--non-private", "--epochs", "1")
    code, _, shown = run("--non-private", "--epochs", "1")
    assert code == 2
    assert "is not empty" in shown


@pytest.mark.parametrize(
    "present, message",
    [
        (["vocab.txt", "model_state.pdparams"], "config.json or model_config.json is missing from this directory"),
        (["config.json", "model.safetensors"], "vocab.txt is missing from this directory"),
        (["model_config.json", "vocab.txt"], "model_state.pdparams or model.safetensors is missing"),
        (None, "no such directory"),
    ],
)
def test_missing_model_files_are_named(run, tmp_path, present, message):
    folder = tmp_path / "model"
    for name in present or ():
        folder.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    code, _, shown = run("--model", str(folder))
    assert code == 2
    assert f"--model {folder}: {message}" in shown


def test_a_hub_that_cannot_be_reached(run, monkeypatch):
    from paddlenlp.transformers import AutoTokenizer

    def fail(name, **kwargs):
        raise OSError("Can't load ernie_3.0_medium_zh_vocab.txt")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail)
    code, _, shown = run("--model", "ernie-3.0-medium-zh")
    assert code == 2
    assert "ernie_3.0_medium_zh_vocab.txt" in shown
    assert "--model DIR" in shown


def test_more_frozen_layers_than_there_are(run):
    code, _, shown = run("--freeze-layers", "9")
    assert code == 2
    assert "the model has 1 encoder layers" in shown


def test_a_batch_larger_than_the_data(run):
    code, _, shown = run("--batch-size", "5000")
    assert code == 2
    assert "batch_size" in shown
