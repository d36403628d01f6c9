"""The ledger as a file: what it keeps, what it refuses, and that no change to it goes unseen."""

from __future__ import annotations

import json
import os
from itertools import combinations

import pytest

from paddle_privacy.errors import LedgerError
from paddle_privacy.ledger import REQUIRED_HEADER, Ledger, environment, file_fingerprint
from paddle_privacy.verify.chain import BrokenLedger, Head, head_path, read_head, read_ledger, seal

GAUSSIAN = {"event": "Gaussian", "noise_multiplier": 1.5}
SAMPLED = {"event": "PoissonSampled", "sample_rate": 0.01, "inner": GAUSSIAN}


def header(**changes):
    base = dict.fromkeys(REQUIRED_HEADER)
    base.update(relation="add_or_remove_one", unit="row", dataset_size=1000, delta=1e-5)
    base.update(changes)
    return base


def write_ledger(path, steps=(4, 3)):
    for run, count in enumerate(steps):
        with Ledger(path).open(header()) as ledger:
            done = sum(times for _, times in ledger.spent)
            for step in range(count):
                ledger.append(SAMPLED if run == 0 else GAUSSIAN, 0.1 * (done + step + 1), step + 1)
    return path


def test_a_ledger_keeps_headers_events_and_steps(tmp_path):
    contents = read_ledger(write_ledger(tmp_path / "l.jsonl"))
    assert [run.steps for run in contents.runs] == [4, 3]
    assert contents.spent == [(SAMPLED, 4), (GAUSSIAN, 3)]
    assert contents.runs[1].epsilon == pytest.approx([0.5, 0.6, 0.7])
    assert all(run.closed for run in contents.runs)
    assert contents.runs[0].header == header()
    assert contents.records == 4 + 3 + 2 + 2


def test_every_line_is_json_and_only_the_first_use_of_an_event_spells_it_out(tmp_path):
    path = write_ledger(tmp_path / "l.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert sum("event" in line for line in lines) == 2
    assert [line["n"] for line in lines] == list(range(len(lines)))


def test_a_second_run_starts_from_what_the_first_spent(tmp_path):
    path = write_ledger(tmp_path / "l.jsonl", steps=(5,))
    with Ledger(path).open(header()) as ledger:
        assert ledger.spent == [(SAMPLED, 5)]
        first_id = ledger.ledger_id
    with Ledger(path).open(header()) as ledger:
        assert ledger.ledger_id == first_id


@pytest.mark.parametrize(
    "name, other", [("relation", "replace_one"), ("unit", "user"), ("dataset_size", 999), ("data_fingerprint", "b")]
)
def test_another_dataset_needs_another_ledger(tmp_path, name, other):
    path = tmp_path / "l.jsonl"
    Ledger(path).open(header(data_fingerprint="a")).close()
    before = path.read_bytes()
    with pytest.raises(LedgerError, match=name):
        Ledger(path).open(header(**{"data_fingerprint": "a", name: other}))
    assert path.read_bytes() == before


def test_a_second_writer_is_refused_and_the_first_goes_on(tmp_path):
    path = tmp_path / "l.jsonl"
    with Ledger(path).open(header()) as ledger:
        with pytest.raises(LedgerError, match="in use by another run"):
            Ledger(path).open(header())
        ledger.append(GAUSSIAN, 1.0, 1)
    assert read_ledger(path).steps == 1


def test_a_second_process_is_refused_even_through_a_hard_link(tmp_path):
    path, link = tmp_path / "l.jsonl", tmp_path / "link.jsonl"
    with Ledger(path).open(header()):
        os.link(path, link)
        os.link(head_path(path), head_path(link))
        child = os.fork()
        if child == 0:
            try:
                Ledger(link).open(header())
            except LedgerError:
                os._exit(17)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17


def test_a_forked_child_cannot_write_to_its_parents_ledger(tmp_path):
    with Ledger(tmp_path / "l.jsonl").open(header()) as ledger:
        child = os.fork()
        if child == 0:
            try:
                ledger.append(GAUSSIAN, 1.0, 1)
            except LedgerError:
                os._exit(17)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
        ledger.append(GAUSSIAN, 1.0, 1)
    assert read_ledger(tmp_path / "l.jsonl").steps == 1


def test_what_epsilon_does_not_cover_is_kept_out_unless_declared_public(tmp_path):
    path = tmp_path / "l.jsonl"
    with Ledger(path).open(header()) as ledger, pytest.raises(ValueError, match="realised_batch.*public_fields"):
        ledger.append(GAUSSIAN, 1.0, 1, realised_batch=31)
    with Ledger(path).open(header(public_fields=["realised_batch"])) as ledger:
        ledger.append(GAUSSIAN, 1.0, 1, realised_batch=31, clip_norm=0.5)
    assert read_ledger(path).runs[1].public == {"realised_batch": [(0, 31)], "clip_norm": [(0, 0.5)]}
    assert read_ledger(path).runs[0].steps == 0


def test_infinite_and_unknown_epsilon_survive_the_file(tmp_path):
    path = tmp_path / "l.jsonl"
    with Ledger(path).open(header()) as ledger:
        ledger.append(GAUSSIAN, None, 1)
        ledger.append(GAUSSIAN, 1.0, 2)
        ledger.append(GAUSSIAN, 0.5, 3)
        ledger.append(GAUSSIAN, float("inf"), 4)
        with pytest.raises(ValueError, match="nan"):
            ledger.append(GAUSSIAN, float("nan"), 5)
    epsilon = read_ledger(path).runs[0].epsilon
    assert epsilon[0] != epsilon[0]
    assert epsilon[1:] == [1.0, 1.0, float("inf")], "spent budget does not come back"


def test_header_problems_leave_no_file_behind(tmp_path):
    path = tmp_path / "l.jsonl"
    with pytest.raises(ValueError, match="clip_norm"):
        Ledger(path).open({"relation": "add_or_remove_one"})
    with pytest.raises(ValueError, match="plain JSON"):
        Ledger(path).open(header(noise_multiplier=float("nan")))
    assert not path.exists()
    with pytest.raises(LedgerError, match="not open"):
        Ledger(path).append(GAUSSIAN, 1.0, 1)


def test_a_full_disk_stops_training_for_good(tmp_path, monkeypatch):
    path = tmp_path / "l.jsonl"
    ledger = Ledger(path).open(header())
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:10], at))
    with pytest.raises(LedgerError, match="must not happen"):
        ledger.append(GAUSSIAN, 1.0, 1)
    monkeypatch.undo()
    with pytest.raises(LedgerError, match="training must stop"):
        ledger.append(GAUSSIAN, 1.0, 1)
    ledger.close()
    contents = read_ledger(path)
    assert (contents.steps, contents.torn_bytes) == (0, 10)
    with Ledger(path).open(header()) as again:
        again.append(GAUSSIAN, 1.0, 1)
    assert json.loads(path.read_text().splitlines()[1])["recovered_torn_bytes"] == 10
    assert read_ledger(path).steps == 1


def test_a_write_cut_at_any_byte_is_an_unacknowledged_record(tmp_path):
    path = tmp_path / "l.jsonl"
    with Ledger(path).open(header()) as ledger:
        ledger.append(GAUSSIAN, 1.0, 1)
        intact, head = path.read_bytes(), head_path(path).read_bytes()
        ledger.append(GAUSSIAN, 2.0, 2)
        longer = path.read_bytes()
    for cut in range(len(intact) + 1, len(longer)):
        path.write_bytes(longer[:cut])
        head_path(path).write_bytes(head)
        assert read_ledger(path).torn_bytes == cut - len(intact)
        with Ledger(path).open(header()) as ledger:
            assert ledger.spent == [(GAUSSIAN, 1)]
        assert read_ledger(path).steps == 1


def test_a_crash_inside_the_very_first_write_is_recovered(tmp_path):
    path = tmp_path / "l.jsonl"
    Ledger(path).open(header()).close()
    first = path.read_bytes().splitlines(keepends=True)[0]
    genesis = Head(0, 0, seal.__globals__["GENESIS"]).to_bytes()
    for cut in (0, 1, len(first) - 1, len(first)):
        path.write_bytes(first[:cut])
        head_path(path).write_bytes(genesis)
        with Ledger(path).open(header()) as ledger:
            ledger.append(GAUSSIAN, 1.0, 1)
        assert read_ledger(path).steps == 1


class TestTampering:
    """Each attack on a closed two-run ledger, exhaustively, with the head file left as it was."""

    @pytest.fixture
    def path(self, tmp_path):
        return write_ledger(tmp_path / "l.jsonl")

    def assert_caught(self, path, data, first_bad=None):
        path.write_bytes(data)
        with pytest.raises(BrokenLedger) as caught:
            read_ledger(path)
        if first_bad is not None:
            assert caught.value.line == first_bad
        with pytest.raises(LedgerError):
            Ledger(path).open(header())
        return caught.value

    def test_every_single_byte_edit(self, path):
        data = path.read_bytes()
        for at in range(len(data)):
            edited = bytearray(data)
            edited[at] ^= 1
            line = data[:at].count(b"\n") + 1
            self.assert_caught(path, bytes(edited), first_bad=line if data[at] != ord("\n") else None)

    def test_every_deletion_duplication_and_swap(self, path):
        lines = path.read_bytes().splitlines(keepends=True)
        for i in range(len(lines)):
            self.assert_caught(path, b"".join(lines[:i] + lines[i + 1 :]), first_bad=i + 1)
            self.assert_caught(path, b"".join(lines[: i + 1] + lines[i:]), first_bad=i + 2)
        for i, j in combinations(range(len(lines)), 2):
            swapped = list(lines)
            swapped[i], swapped[j] = swapped[j], swapped[i]
            self.assert_caught(path, b"".join(swapped), first_bad=i + 1)

    def test_every_truncation(self, path):
        data = path.read_bytes()
        for size in range(len(data)):
            self.assert_caught(path, data[:size], first_bad=data[:size].count(b"\n") + 1)

    def test_an_edit_with_its_own_hash_repaired(self, path):
        lines = path.read_bytes().splitlines(keepends=True)
        for i in range(len(lines)):
            forged = self.rewrite(lines, i, only=True)
            self.assert_caught(path, b"".join(forged), first_bad=min(i + 2, len(lines)))

    def test_an_edit_with_all_later_hashes_repaired_meets_the_head_file(self, path):
        lines = path.read_bytes().splitlines(keepends=True)
        for i in range(len(lines)):
            caught = self.assert_caught(path, b"".join(self.rewrite(lines, i)), first_bad=len(lines))
            assert "head file or the receipt" in caught.problem

    def test_rewriting_the_head_as_well_needs_a_receipt_to_be_seen(self, path):
        receipt = read_ledger(path).receipt
        lines = path.read_bytes().splitlines(keepends=True)
        forged = b"".join(self.rewrite(lines, 3))
        path.write_bytes(forged)
        digest = json.loads(forged.splitlines()[-1])["hash"]
        head_path(path).write_bytes(Head(len(lines), len(forged), digest).to_bytes())
        assert read_ledger(path).steps == 7, "the documented limit of an unkeyed chain"
        with pytest.raises(BrokenLedger, match="receipt"):
            read_ledger(path, receipt=receipt)

    def test_a_receipt_stays_valid_while_the_ledger_grows(self, path):
        receipt = read_ledger(path).receipt
        with Ledger(path).open(header()) as ledger:
            ledger.append(GAUSSIAN, 5.0, 1)
        assert read_ledger(path, receipt=receipt).steps == 8
        with pytest.raises(LedgerError, match="64 hex"):
            read_ledger(path, receipt="12")

    def test_the_head_file(self, path):
        raw = head_path(path).read_bytes()
        for at in range(len(raw)):
            edited = bytearray(raw)
            edited[at] ^= 1
            head_path(path).write_bytes(edited)
            with pytest.raises(BrokenLedger):
                read_ledger(path)
        head_path(path).unlink()
        with pytest.raises(BrokenLedger, match="is missing, so a truncation"):
            read_ledger(path)
        with pytest.raises(LedgerError):
            Ledger(path).open(header())
        assert read_ledger(path, require_head=False).steps == 7

    def test_a_ledger_that_vanished(self, path):
        path.unlink()
        with pytest.raises(LedgerError, match="knows of 11 records"):
            Ledger(path).open(header())
        assert not path.exists()
        with pytest.raises(LedgerError):
            read_ledger(path)

    @staticmethod
    def rewrite(lines, index, only=False):
        """Line ``index`` with another timestamp, and its hash (or all from there on) made to fit."""
        records = [json.loads(line) for line in lines]
        previous = records[index - 1]["hash"] if index else seal.__globals__["GENESIS"]
        forged = list(lines)
        for i in range(index, index + 1 if only else len(lines)):
            record = {name: value for name, value in records[i].items() if name != "hash"}
            if i == index:
                record["time"] += 1
            forged[i], previous = seal(previous, record)
        return forged


def test_environment_names_versions_and_is_plain_json():
    described = json.loads(json.dumps(environment()))
    assert {"python", "numpy", "scipy", "paddle_privacy"} <= described["versions"].keys()


def test_the_head_never_leads_the_ledger(tmp_path, monkeypatch):
    """Order of the writes: at every sync of the ledger the head still describes the record before."""
    path = tmp_path / "l.jsonl"
    ledger = Ledger(path).open(header())
    seen = []
    monkeypatch.setattr(
        "paddle_privacy.ledger._sync", lambda fd: seen.append((path.read_bytes().count(b"\n"), read_head(path).records))
    )
    for step in range(3):
        ledger.append(GAUSSIAN, 1.0, step)
    ledger.close()
    assert seen == [(2, 1), (3, 2), (4, 3), (5, 4)]


def test_the_owner_of_the_data_adds_to_every_header(tmp_path):
    data = tmp_path / "rows.tsv"
    data.write_text("a\nb\n")
    print_of = file_fingerprint([data])
    path = tmp_path / "l.jsonl"
    owner = {"data_fingerprint": print_of, "public_fields": ["realised_batch"], "unit": "hospital"}
    with Ledger(path, owner).open(header()) as ledger:
        ledger.append(GAUSSIAN, 1.0, 1, realised_batch=3)
    kept = read_ledger(path).runs[0].header
    assert kept["data_fingerprint"] == print_of
    assert kept["unit"] == "row", "the optimizer's own statement stands"
    data.write_text("a\nc\n")
    assert file_fingerprint([data]) != print_of
    assert file_fingerprint([data], key=b"k") != file_fingerprint([data])
    with pytest.raises(LedgerError, match="data_fingerprint"):
        Ledger(path, {"data_fingerprint": file_fingerprint([data])}).open(header())
