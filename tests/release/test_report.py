"""What a report says, in every format and both languages."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from string import Formatter

import pytest

from paddle_privacy.accounting import Gaussian, PLDAccountant, PoissonSampled, RDPAccountant
from paddle_privacy.errors import LedgerError
from paddle_privacy.ledger import REQUIRED_HEADER, Ledger
from paddle_privacy.report import Tuning, collect, write_report
from paddle_privacy.report.chart import render_chart, ticks
from paddle_privacy.report.document import Chart, build_document, epsilon_text, percent, scientific
from paddle_privacy.report.pdf import write_pdf
from paddle_privacy.report.text import texts

EVENT = PoissonSampled(0.02, Gaussian(1.0))
DELTA = 1e-5
AUDIT = {
    "bounds": [{"name": "<one run>", "epsilon": 0.5, "confidence": 0.95, "canaries": 500}],
    "attacks": [
        {
            "name": "loss",
            "auc": 0.52,
            "auc_interval": [0.5, 0.6],
            "points": [{"false_positive_rate": 0.01, "true_positive_rate": 0.02, "interval": [0.01, 0.03]}] * 2,
        }
    ],
}


def write_ledger(path, steps=50, **changes):
    header = dict.fromkeys(REQUIRED_HEADER)
    header.update(
        relation="add_or_remove_one",
        unit="one row of the training set",
        dataset_size=1000,
        batch_size=20,
        sampling="poisson",
        noise={"kind": "chacha20-os", "secure": True},
        accountant="rdp",
        delta=DELTA,
        versions={"python": "3.11"},
        public_fields=["clip_fraction"],
    )
    header.update(changes)
    accountant = RDPAccountant()
    with Ledger(path).open(header) as ledger:
        for step in range(1, steps + 1):
            accountant.compose(EVENT)
            ledger.append(EVENT.to_dict(), accountant.get_epsilon(DELTA), step, clip_fraction=0.5)
    return path


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    path = write_ledger(tmp_path_factory.mktemp("report") / "ledger.jsonl")
    return collect(
        [path], max_epsilon=5.0, utility=[{"metric": "acc <b>", "private": 0.8}], audit=AUDIT, title="Bank & Co <x>"
    )


class Checker(HTMLParser):
    """Every element is closed in order, and nothing refers to another file or host."""

    VOID = {"meta", "br", "hr", "img", "input", "link"}

    def __init__(self):
        super().__init__()
        self.open, self.links, self.text = [], [], []

    def handle_starttag(self, tag, attributes):
        if tag not in self.VOID:
            self.open.append(tag)
        self.links += [(tag, name) for name, _ in attributes if name in ("src", "href", "srcset", "data", "action")]

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        self.text.append(data)


def test_facts_are_what_the_accountants_say(facts):
    assert facts.epsilon == pytest.approx(RDPAccountant().compose(EVENT, 50).get_epsilon(DELTA))
    assert facts.epsilons["pld"] == pytest.approx(PLDAccountant().compose(EVENT, 50).get_epsilon(DELTA))
    assert "zcdp" not in facts.epsilons, "zCDP has no bound for Poisson sampling; a number would be false"
    assert facts.within_limit and facts.verified and not facts.seeded
    group = dict(facts.groups)
    assert group[1] < group[2] < group[10], "a person with more rows is protected less"
    assert group[1] == pytest.approx(facts.epsilons[facts.sharpest])
    assert facts.trajectory[-1] == (50, pytest.approx(facts.epsilon))
    assert all(a < b for a, b in zip(facts.epsilon_of_delta["rdp"][1:], facts.epsilon_of_delta["rdp"]))


@pytest.mark.parametrize("language", ["en", "zh"])
def test_html_is_one_well_formed_file_that_needs_no_network(facts, tmp_path, language):
    path = tmp_path / "r.html"
    assert write_report(facts, path, language=language) == "html"
    content = path.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(content)
    checker.close()
    assert checker.open == [] and checker.links == []
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import|<script", content)
    text = "".join(checker.text)
    assert "Bank & Co <x>" in text and "acc <b>" in text and "<one run>" in text, "text from outside is escaped"
    assert epsilon_text(facts.epsilon, language) in text
    assert f'lang="{texts(language)["html_lang"]}"' in content
    assert "{" not in re.sub(r"<style>.*?</style>", "", content, flags=re.S), "a placeholder was not filled in"
    assert content.count("<svg") >= 3


@pytest.mark.parametrize("language", ["en", "zh"])
def test_markdown_and_json(facts, tmp_path, language):
    write_report(facts, tmp_path / "r.md", language=language)
    content = (tmp_path / "r.md").read_text(encoding="utf-8")
    assert epsilon_text(facts.epsilon, language) in content
    assert texts(language)["limits"] in content
    for block in re.findall(r"(?:^\|.*\n)+", content, flags=re.M):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(widths) == 1, block
    write_report(facts, tmp_path / "r.json", language=language)
    data = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert data["epsilon"] == facts.epsilon and data["within_limit"] is True
    assert data["ledgers"][0]["runs"][0]["steps"] == 50


def test_pdf_by_matplotlib(facts, tmp_path):
    assert write_pdf(build_document(facts, "en"), tmp_path / "r.pdf", browser="") == "matplotlib"
    content = (tmp_path / "r.pdf").read_bytes()
    assert content.startswith(b"%PDF") and content.count(b"/Type /Page\n") + content.count(b"/Type /Page ") >= 3


def test_pdf_falls_back_where_the_browser_fails(facts, tmp_path):
    assert write_pdf(build_document(facts, "en"), tmp_path / "r.pdf", browser="false") == "matplotlib"


def test_both_languages_say_the_same_things():
    english, chinese = texts("en"), texts("zh")
    assert english.keys() == chinese.keys()
    for key in english:
        names = [{name for _, name, _, _ in Formatter().parse(t[key]) if name} for t in (english, chinese)]
        assert names[0] == names[1], key
    prose = "".join(chinese.values())
    assert not re.search(r"[\u4e00-\u9fff][,:;()?!]|[,:;()?!][\u4e00-\u9fff]", prose), "half-width punctuation"


@pytest.fixture
def only_rdp(monkeypatch):
    """Seconds saved where the numbers of the other accountants are not looked at."""
    monkeypatch.setattr("paddle_privacy.report.facts.ACCOUNTANTS", ("rdp",))


@pytest.mark.usefixtures("only_rdp")
class TestVerdicts:
    def verdict(self, tmp_path, **arguments):
        path = write_ledger(tmp_path / "l.jsonl", **arguments.pop("header", {}))
        document = build_document(collect([path], **arguments), "en")
        return document.verdict, document.verdict_kind

    def test_above(self, tmp_path):
        verdict, kind = self.verdict(tmp_path, max_epsilon=0.1)
        assert kind == "bad" and verdict.startswith("Above the limit")

    def test_no_limit(self, tmp_path):
        assert self.verdict(tmp_path)[1] == "neutral"

    def test_seeded_noise_outranks_everything(self, tmp_path):
        verdict, kind = self.verdict(tmp_path, max_epsilon=100.0, header={"noise": {"kind": "seeded", "secure": False}})
        assert kind == "bad" and "seed" in verdict

    def test_a_ledger_that_flatters(self, tmp_path):
        path = tmp_path / "l.jsonl"
        header = dict.fromkeys(REQUIRED_HEADER)
        header.update(relation="add_or_remove_one", unit="row", delta=DELTA, accountant="rdp")
        with Ledger(path).open(header) as ledger:
            for step in range(1, 200):
                ledger.append(EVENT.to_dict(), 0.01, step)
        facts = collect([path], max_epsilon=100.0)
        assert build_document(facts, "en").verdict_kind == "bad"
        assert facts.epsilon > 0.5, "the headline is recomputed, not read"
        for language in ("en", "zh"):
            write_report(facts, tmp_path / f"{language}.html", language=language)


@pytest.mark.usefixtures("only_rdp")
class TestTuning:
    def test_composition_adds_the_tuning_runs(self, tmp_path):
        final, other = write_ledger(tmp_path / "a.jsonl"), write_ledger(tmp_path / "b.jsonl", steps=100)
        facts = collect([final], tuning=Tuning("composition", (other,)))
        assert facts.epsilon == pytest.approx(RDPAccountant().compose(EVENT, 150).get_epsilon(DELTA))
        assert facts.epsilon_without_tuning < facts.epsilon
        assert "150" in build_document(facts, "en").subtitle

    def test_papernot_steinke(self, tmp_path):
        path = write_ledger(tmp_path / "a.jsonl")
        facts = collect([path], tuning=Tuning("papernot_steinke", mean_runs=10.0))
        assert facts.epsilon_without_tuning < facts.epsilon
        write_report(facts, tmp_path / "r.html", language="zh")

    def test_one_ledger_twice_is_refused(self, tmp_path):
        path = write_ledger(tmp_path / "a.jsonl")
        with pytest.raises(LedgerError, match="copies of one ledger"):
            collect([path], tuning=Tuning("composition", (path,)))

    def test_arguments(self):
        with pytest.raises(ValueError, match="method"):
            Tuning("grid")
        with pytest.raises(ValueError, match="composition"):
            Tuning("composition")


def test_numbers_are_never_rounded_down():
    assert epsilon_text(2.9991, "en") == "3.000"
    assert epsilon_text(3.0, "en") == "3.000"
    assert percent(0.0123) == "1.3%" and percent(0.5) == "50%" and percent(0.00101) == "0.11%"
    assert scientific(1e-5) == "10^-5" and scientific(2.5e-7) == "2.5×10^-7"


def test_charts_survive_anything_an_accountant_answers():
    inf = float("inf")
    assert render_chart(Chart("t", "x", "y", (("", ((1.0, inf), (2.0, inf))),))) == ""
    assert "<polyline" in render_chart(Chart("t", "x", "y", (("", ((1.0, 0.0),)),), log_x=True))
    assert "&lt;t&gt;" in render_chart(Chart("<t>", "x", "y", (("", ((1.0, 2.0), (2.0, inf), (3.0, 4.0))),)))
    assert ticks(0.0, 4.7) == [0, 1, 2, 3, 4, 5] and ticks(2.0, 2.0)[-1] > 2


def test_formats(facts, tmp_path):
    with pytest.raises(ValueError, match="format"):
        write_report(facts, tmp_path / "r.docx")
    with pytest.raises(ValueError, match="language"):
        write_report(facts, tmp_path / "r.html", language="fr")
    assert list(tmp_path.iterdir()) == []
