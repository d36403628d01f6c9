"""Reading and deduplicating rows."""

import pytest
import reviews
from conftest import read
from hypothesis import given
from hypothesis import strategies as st

ROWS = st.lists(st.tuples(st.sampled_from("甲乙丙丁"), st.integers(0, 1)), max_size=12)


def test_reads_a_folder(small_folder, mini):
    data = reviews.load(str(small_folder))
    assert data.labels == ["0", "1"]
    assert data.train[:300] == mini["train"][:300]
    assert (len(data.dev), len(data.test)) == (60, 60)
    assert not data.public


def test_labels_may_be_any_strings(small_folder):
    for name in ("train", "dev", "test"):
        path = small_folder / f"{name}.tsv"
        lines = path.read_text(encoding="utf-8").splitlines()
        named = [line.replace("0\t", "差\t", 1).replace("1\t", "好\t", 1) for line in lines]
        path.write_text("\n".join(named) + "\n", encoding="utf-8")
    data = reviews.load(str(small_folder))
    assert data.labels == ["好", "差"]
    assert {label for _, label in data.train} == {0, 1}


def test_quotes_are_text(small_folder):
    path = small_folder / "dev.tsv"
    path.write_text('label\ttext_a\n1\t"好"得很\n0\t"差\n', encoding="utf-8")
    assert reviews.load(str(small_folder)).dev == [('"好"得很', 1), ('"差', 0)]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("train.tsv", None, "train.tsv: no such file"),
        ("dev.tsv", None, r"dev.tsv: no such file; .* Nothing is split off"),
        ("dev.tsv", "text\n好\n", "columns label and text_a"),
        ("dev.tsv", "label\ttext_a\n1\t好\t多\n", "line 2: 3 columns where the header has 2"),
        ("test.tsv", "label\ttext_a\n", "no rows"),
        ("test.tsv", "label\ttext_a\n7\t好\n", r"labels \['7'\] do not occur in train.tsv"),
        ("train.tsv", "label\ttext_a\n1\t好\n", "at least two different labels"),
    ],
)
def test_malformed_files_are_named(small_folder, name, content, message):
    path = small_folder / name
    path.unlink()
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(reviews.DataError, match=message):
        reviews.load(str(small_folder))


def test_a_byte_order_mark_is_no_part_of_a_name(small_folder):
    path = small_folder / "dev.tsv"
    path.write_bytes(b"\xef\xbb\xbf" + "label\ttext_a\r\n1\t好\r\n".encode())
    assert reviews.load(str(small_folder)).dev == [("好", 1)]


def test_another_encoding_is_named(small_folder):
    (small_folder / "dev.tsv").write_bytes("label\ttext_a\n1\t好\n".encode("gbk"))
    with pytest.raises(reviews.DataError, match="dev.tsv: not UTF-8 .* at byte 15"):
        reviews.load(str(small_folder))


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(reviews.DataError, match="nowhere: no such folder; pass mini"):
        reviews.load(str(tmp_path / "nowhere"))


def test_deduplicate_counts():
    rows = [("甲", 1), ("乙", 0), ("甲", 1), ("丙", 0), ("丙", 1), ("丙", 1), ("乙", 0), ("乙", 0), ("丁", 1)]
    found = reviews.deduplicate(rows)
    assert found.rows == [("甲", 1), ("乙", 0), ("丁", 1)]
    assert (found.repeats, found.conflicting_texts, found.conflicting_rows) == (3, 1, 3)
    assert reviews.most_copies(rows) == 3


@given(ROWS)
def test_every_row_is_kept_or_counted(rows):
    found = reviews.deduplicate(rows)
    assert len(found.rows) + found.repeats + found.conflicting_rows == len(rows)
    assert len({text for text, _ in found.rows}) == len(found.rows)
    assert set(found.rows) <= set(rows)


@given(ROWS, st.tuples(st.sampled_from("甲乙丙丁"), st.integers(0, 1)))
def test_one_row_more_changes_the_training_set_by_one_row_at_most(rows, row):
    """What the stated unit of privacy rests on."""
    before, after = set(reviews.deduplicate(rows).rows), set(reviews.deduplicate([*rows, row]).rows)
    assert len(before ^ after) <= 1


@given(ROWS, st.sampled_from("甲乙丙丁"))
def test_a_text_with_all_its_copies_changes_the_training_set_by_one_row_at_most(rows, text):
    without = [row for row in rows if row[0] != text]
    before, after = set(reviews.deduplicate(rows).rows), set(reviews.deduplicate(without).rows)
    assert len(before ^ after) <= 1


def test_unseen_compares_texts_with_all_of_train():
    train = [("甲", 1), ("乙", 0), ("乙", 1)]
    assert reviews.unseen_mask([("甲", 0), ("乙", 1), ("丙", 1)], train) == [False, False, True]


def test_training_rows_whose_text_stands_in_the_test_file_can_go(run, small_folder):
    data = reviews.load(str(small_folder))
    (shared,) = {text for text, _ in data.test} & {text for text, _ in data.train}
    kept = reviews.without_test_texts(data)
    assert kept.train == [row for row in data.train if row[0] != shared]
    assert (kept.dev, kept.test) == (data.dev, data.test)
    only = reviews.Reviews(data.test, data.dev, data.test, data.labels, public=False)
    with pytest.raises(reviews.DataError, match="--drop-test-texts"):
        reviews.without_test_texts(only)

    code, folder, shown = run("--drop-test-texts", "--epochs", "1", "--batch-size", "100", "--max-length", "8")
    assert code == 0, shown
    assert read(folder, "config.json")["training_rows"] == len(reviews.deduplicate(kept.train).rows)
    assert read(folder, "summary.json")["test_rows_unseen"] == len(data.test)
    code, _, shown = run("--dry-run", "--drop-test-texts", "--batch-size", "100", "--max-length", "8")
    assert f"the {len(reviews.deduplicate(kept.train).rows)} training rows were counted" in shown
