"""--staged: a verdict without noise on public rows, then the private run as if nothing had been."""

import numpy as np
import pytest
import reviews
from conftest import read

EPOCHS = 8
# Batches are drawn anew each time: at three times this rate one run in ten ended where it began. Of twenty runs like
# this all were right on every dev row, with a loss of at most 0.013.
FLAGS = ("--batch-size", "40", "--epochs", str(EPOCHS), "--max-length", "8", "--learning-rate", "0.01")


def write(folder, rows):
    folder.mkdir(exist_ok=True)
    for name in ("train", "dev", "test"):
        lines = "".join(f"{label}\t{text}\n" for text, label in rows)
        (folder / f"{name}.tsv").write_text("label\ttext_a\n" + lines, encoding="utf-8")
    return folder


@pytest.fixture
def easy(tmp_path):
    """Public rows that a few steps learn, and that are none of `small_folder`'s."""
    characters = "甲乙丙丁戊己庚辛壬癸"
    texts = [(f"{a}{b}{'好' if label else '差'}", label) for a in characters for b in characters for label in (0, 1)]
    return write(tmp_path / "easy", texts)


def test_it_learns_and_the_private_stage_starts_afresh(run, easy, begun, tmp_path):
    code, folder, shown = run("--staged", "--staged-data", easy, *FLAGS)
    assert code == 0
    assert "stage 1 verdict: learns without noise" in shown
    found = read(folder, "stage1.json")
    assert found["learns"]
    assert found["dev_accuracy_after"] > 0.9
    assert "not private" in found["statement"]
    assert found["steps"] == EPOCHS * 5
    assert read(folder, "summary.json")["epsilon"] <= 3.0

    run(*FLAGS, "--epochs", "1", output=tmp_path / "unstaged")
    staged, unstaged = begun
    for left, right in zip(staged["weights"], unstaged["weights"]):
        np.testing.assert_array_equal(left, right)


def test_nothing_is_spent_where_it_does_not_learn(run, easy, begun):
    code, folder, shown = run("--staged", "--staged-data", easy, *FLAGS[:-1], "1e-9", "--epochs", "1")
    assert code == 1
    assert "does not learn even without noise" in shown
    assert not read(folder, "stage1.json")["learns"]
    assert not (folder / "ledger.jsonl").exists()
    assert not (folder / "model").exists()
    assert not begun


def test_private_rows_are_refused_under_any_name(run, small_folder, tmp_path):
    copied = tmp_path / "copy"
    copied.mkdir()
    for path in small_folder.iterdir():
        lines = path.read_text(encoding="utf-8").splitlines()
        (copied / path.name).write_text("\n".join([lines[0], *reversed(lines[1:])]) + "\n", encoding="utf-8")
    for flags, message in (
        ((), "--data is the private data"),
        (("--staged-data", small_folder / ".." / "data"), "--data is the private data"),
        (("--staged-data", copied), "100% of its training rows stand in the private training file too"),
    ):
        code, folder, shown = run("--staged", *flags, *FLAGS)
        assert code == 2
        assert message in shown
        assert not any(folder.iterdir())


def test_on_private_rows_only_the_verdict_is_kept_and_a_warning_given(run, easy):
    code, folder, shown = run("--staged", "--non-private", *FLAGS, "--clip-norm", "1", data=easy)
    assert code == 0
    assert "NOT PRIVATE" in shown
    assert read(folder, "stage1.json")["clip_norm"] == 1.0
    assert [path.name for path in folder.iterdir()] == ["stage1.json"]


def test_flags_that_do_not_go_with_it(run, capsys):
    for flags, message in (
        (("--staged-data", "mini"), "--staged-data is used by --staged only"),
        (("--staged", "--non-private", "--staged-data", "mini"), "not with --non-private"),
        (("--staged", "--dry-run"), "pass one of them"),
    ):
        with pytest.raises(SystemExit):
            run(*flags)
        assert message in capsys.readouterr().err


def test_public_rows_are_as_many_as_the_private_ones(easy, small_folder):
    import staged
    from arguments import parse_arguments

    private = reviews.load(str(small_folder))
    args = parse_arguments(["--data", str(small_folder), "--staged", "--staged-data", str(easy)])
    assert len(staged.public_rows(args, private).train) == 200
    few = reviews.Reviews(private.train[:50], private.dev, private.test, private.labels, public=False)
    rows = staged.public_rows(args, few).train
    assert len(rows) == len(set(rows)) == 50
    assert {label for _, label in rows} == {0, 1}


@pytest.mark.parametrize(
    "loss_after, right, learns",
    [(0.6, 66, True), (0.6, 64, False), (0.7, 90, False), (0.69, 100, True)],
)
def test_verdict(loss_after, right, learns):
    """Of 100 rows 50 carry the commonest label: the standard error is 5%, so the edge is at 65%."""
    import staged
    from evaluation import Score

    before = Score(0.7, np.arange(100) < 50)
    after = Score(loss_after, np.arange(100) < right)
    assert staged.verdict(before, after, [0, 1] * 50)["learns"] == learns
