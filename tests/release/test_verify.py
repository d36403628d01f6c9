"""A ledger whose chain holds can still lie about ε; verify must name the first line that does."""

from __future__ import annotations

import json
import time

import pytest

from paddle_privacy.accounting import Gaussian, PoissonSampled, RDPAccountant, ShuffledEpoch, get_accountant
from paddle_privacy.errors import LedgerError
from paddle_privacy.ledger import REQUIRED_HEADER, Ledger
from paddle_privacy.verify.chain import read_ledger
from paddle_privacy.verify.check import total_epsilon, verify_ledger

EVENT = PoissonSampled(0.02, Gaussian(1.0))


def header(**changes):
    base = dict.fromkeys(REQUIRED_HEADER)
    base.update(relation="add_or_remove_one", unit="row", delta=1e-5, accountant="rdp", noise={"secure": True})
    base.update(changes)
    return base


def run(path, steps, event=EVENT, flatter_from=None, carry=True, **changes):
    with Ledger(path).open(header(**changes)) as ledger:
        accountant = get_accountant(changes.get("accountant", "rdp"))
        if carry:
            from paddle_privacy.accounting import Event

            for spent, count in ledger.spent:
                accountant.compose(Event.from_dict(spent), count)
        for step in range(1, steps + 1):
            accountant.compose(event)
            epsilon = accountant.get_epsilon(1e-5)
            if flatter_from is not None and step >= flatter_from:
                epsilon *= 0.5
            ledger.append(event.to_dict(), epsilon, step)
    return path


def test_an_honest_ledger(tmp_path):
    result = verify_ledger(run(tmp_path / "l.jsonl", 60))
    assert result.ok and not result.notes
    assert result.recomputed == pytest.approx(result.recorded, rel=1e-9)
    assert result.interval.low <= result.interval.high <= result.recorded
    assert result.epsilon == result.recomputed


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_honest_by_each_accountant(tmp_path, accountant):
    assert verify_ledger(run(tmp_path / "l.jsonl", 20, accountant=accountant)).ok


def test_flattering_is_found_at_its_first_line(tmp_path):
    """The recorded ε may not fall, so halving it freezes the running maximum; truth overtakes it later."""
    path = run(tmp_path / "l.jsonl", 200, flatter_from=100)
    assert verify_ledger(path).problems[-1].code == "problem_accountant"
    with Ledger(tmp_path / "n.jsonl").open(header()) as ledger:
        for step in range(1, 61):
            ledger.append(EVENT.to_dict(), 0.2, step)
    problem = verify_ledger(tmp_path / "n.jsonl").problems[0]
    exact = next(n for n in range(1, 61) if get_accountant("pld").compose(EVENT, n).get_epsilon(1e-5) > 0.2)
    assert problem.code == "problem_limit"
    assert abs(problem.line - (exact + 1)) <= 1, "line 1 is the header, so step n is line n + 1"


def test_a_second_run_that_forgets_the_first_is_caught(tmp_path):
    path = run(tmp_path / "l.jsonl", 300)
    run(path, 300, carry=False)
    result = verify_ledger(path)
    assert not result.ok
    assert result.problems[0].line > 302, "the first run was honest"


def test_a_second_run_that_continues_is_fine(tmp_path):
    path = run(tmp_path / "l.jsonl", 30)
    run(path, 30)
    assert verify_ledger(path).ok


def test_delta_can_be_chosen_and_notes_are_made(tmp_path):
    path = tmp_path / "l.jsonl"
    ledger = Ledger(path).open(
        header(delta=None, noise={"secure": False}, sampling_declared_by_user=True, relation="zero_out")
    )
    ledger.append(ShuffledEpoch(Gaussian(1.0)).to_dict(), None, 1)
    result = verify_ledger(path)
    assert result.delta is None and result.ok
    assert {note.code for note in result.notes} == {"note_open", "note_seeded", "note_declared", "note_no_delta"}
    assert verify_ledger(path, delta=1e-5).recomputed > 3
    ledger.close()


def test_several_ledgers_compose(tmp_path):
    paths = [run(tmp_path / "a.jsonl", 10), run(tmp_path / "b.jsonl", 20)]
    total = total_epsilon([read_ledger(path) for path in paths], 1e-5, "rdp")
    assert total == pytest.approx(RDPAccountant().compose(EVENT, 30).get_epsilon(1e-5))


def test_events_nobody_knows_are_an_error(tmp_path):
    path = tmp_path / "l.jsonl"
    with Ledger(path).open(header()) as ledger:
        ledger.append({"event": "Laplace", "scale": 1.0}, 1.0, 1)
    with pytest.raises(LedgerError, match="Laplace"):
        verify_ledger(path)


def test_a_live_ledger_can_be_verified(tmp_path):
    path = tmp_path / "l.jsonl"
    with Ledger(path).open(header()) as ledger:
        ledger.append(EVENT.to_dict(), RDPAccountant().compose(EVENT).get_epsilon(1e-5), 1)
        assert verify_ledger(path).ok
        ledger.append(EVENT.to_dict(), RDPAccountant().compose(EVENT, 2).get_epsilon(1e-5), 2)
    assert verify_ledger(path).ok


@pytest.mark.slow
def test_a_million_records(tmp_path, monkeypatch):
    """Run by hand; prints the time of the full verification."""
    monkeypatch.setattr("paddle_privacy.ledger._sync", lambda fd: None)
    path = tmp_path / "l.jsonl"
    event = PoissonSampled(0.001, Gaussian(1.0))
    final = RDPAccountant().compose(event, 1_000_000).get_epsilon(1e-5)
    with Ledger(path).open(header()) as ledger:
        described = event.to_dict()
        for step in range(1, 1_000_001):
            ledger.append(described, final, step)
    started = time.perf_counter()
    assert verify_ledger(path).ok
    print(json.dumps({"records": 1_000_002, "seconds": round(time.perf_counter() - started, 1)}))
