"""From facts to a document: sections of paragraphs, tables, lists and charts, the same for every format."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Union

from ..version import __version__
from .facts import ENVIRONMENT_FIELDS, Facts, describe_ledger
from .text import text, texts


@dataclass(frozen=True)
class Paragraph:
    """``**bold**`` is the only markup."""

    text: str
    tone: str = ""
    """"caution" and "warning" are set apart."""


@dataclass(frozen=True)
class Bullets:
    items: tuple[str, ...]


@dataclass(frozen=True)
class Code:
    text: str


@dataclass(frozen=True)
class Table:
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    numeric: bool = False
    """Whether all columns but the first hold numbers."""


@dataclass(frozen=True)
class Chart:
    title: str
    x_label: str
    y_label: str
    series: tuple[tuple[str, tuple[tuple[float, float], ...]], ...]
    log_x: bool = False
    limit: tuple[str, float] | None = None


@dataclass(frozen=True)
class Bars:
    """Lower limits against the upper one, which comes last."""

    title: str
    rows: tuple[tuple[str, float], ...]


Block = Union[Paragraph, Bullets, Code, Table, Chart, Bars]


@dataclass
class Section:
    title: str
    blocks: list[Block] = field(default_factory=list)


@dataclass
class Document:
    language: str
    title: str
    subtitle: str
    verdict: str
    verdict_kind: str
    """"good", "bad" or "neutral"."""
    integrity: str
    integrity_kind: str
    tiles: list[tuple[str, str]]
    sections: list[Section]


def number(value: Any, language: str = "en", digits: int = 3) -> str:
    """A number as a reader wants it; ε is rounded up, so that the report never states less than was computed."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return text(language, "unknown")
    if isinstance(value, float) and math.isinf(value):
        return text(language, "infinite")
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0:
        return "0"
    if abs(value) >= 1e5 or abs(value) < 1e-3:
        return scientific(value)
    return f"{value:.{digits}g}" if abs(value) < 100 else f"{value:,.1f}"


def epsilon_text(value: float, language: str) -> str:
    """ε to three decimals, rounded up."""
    if math.isnan(value) or math.isinf(value):
        return number(value, language)
    return f"{math.ceil(value * 1000 - 1e-9) / 1000:.3f}"


def short_name(accountant: str) -> str:
    return "zCDP" if accountant == "zcdp" else accountant.upper()


def scientific(value: float) -> str:
    mantissa, exponent = f"{value:.2e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".")
    power = f"10^{int(exponent)}"
    return power if mantissa == "1" else f"{mantissa}×{power}"


def percent(value: float) -> str:
    """A share, with enough digits to tell small ones apart, rounded up."""
    digits = 1 if value >= 0.01 else 2
    scale = 10.0 ** (digits + 2)
    return f"{math.ceil(value * scale - 1e-9) / scale * 100:.{digits}f}".rstrip("0").rstrip(".") + "%"


def build_document(facts: Facts, language: str = "en") -> Document:
    """The whole report in one language."""
    writer = _Writer(facts, language)
    first = facts.verifications[-1].contents.runs[-1].header
    verdict, kind = writer.verdict()
    intact = facts.verified
    return Document(
        language=texts(language)["html_lang"],
        title=facts.title or writer.say("title"),
        subtitle=writer.say(
            "subtitle",
            generated=facts.generated.replace("T", " "),
            version=__version__,
            ledgers=len(facts.verifications),
            steps=f"{facts.steps:,}",
        ),
        verdict=verdict,
        verdict_kind=kind,
        integrity=writer.say("intact" if intact else "broken"),
        integrity_kind="good" if intact else "bad",
        tiles=[
            (writer.say("tile_epsilon"), writer.epsilon(facts.epsilon)),
            (writer.say("tile_delta"), number(facts.delta, language)),
            (writer.say("tile_rows"), number(first.get("dataset_size"), language)),
            (writer.say("tile_steps"), number(facts.steps, language)),
        ],
        sections=[section for section in writer.sections() if section.blocks],
    )


class _Writer:
    def __init__(self, facts: Facts, language: str) -> None:
        self.facts, self.language = facts, language

    def say(self, key: str, **values: Any) -> str:
        return text(self.language, key, **values)

    def epsilon(self, value: float) -> str:
        return epsilon_text(value, self.language)

    def number(self, value: Any) -> str:
        return number(value, self.language)

    def verdict(self) -> tuple[str, str]:
        facts = self.facts
        if facts.seeded:
            return self.say("verdict_seeded"), "bad"
        if not facts.verified:
            return self.say("verdict_problem"), "bad"
        epsilon = self.epsilon(facts.epsilon)
        if facts.max_epsilon is None:
            return self.say("verdict_none", epsilon=epsilon), "neutral"
        if facts.within_limit:
            return self.say("verdict_within", epsilon=epsilon, limit=f"{facts.max_epsilon:g}"), "good"
        return self.say("verdict_above", epsilon=epsilon, limit=f"{facts.max_epsilon:g}"), "bad"

    def sections(self) -> list[Section]:
        return [
            self.protected(),
            self.meaning(),
            self.losses(),
            self.groups(),
            self.tuning(),
            self.audit(),
            self.utility(),
            self.setup(),
            self.public(),
            self.limits(),
            self.integrity(),
            self.environment(),
        ]

    def protected(self) -> Section:
        facts = self.facts
        factor = math.exp(facts.epsilon) if facts.epsilon < 700 else math.inf
        blocks: list[Block] = [
            Paragraph(self.say("protected_unit", unit=texts(self.language).get(f"unit: {facts.unit}", facts.unit))),
            Paragraph(self.say(f"relation_{facts.relation}")),
            Paragraph(self.say("guarantee", factor=self.number(factor), delta=self.number(facts.delta))),
            Paragraph(self.say("noise_seeded"), "warning") if facts.seeded else Paragraph(self.say("noise_secure")),
        ]
        return Section(self.say("protected"), blocks)

    def meaning(self) -> Section:
        facts = self.facts
        hit = dict(facts.attack)[0.01]
        rows = tuple((percent(rate), percent(limit)) for rate, limit in facts.attack)
        return Section(
            self.say("meaning"),
            [
                Paragraph(self.say("meaning_belief", belief=percent(facts.belief))),
                Paragraph(self.say("meaning_attack", fpr=percent(0.01), tpr=percent(hit))),
                Table(
                    (self.say("attack_fpr"), self.say("attack_tpr")),
                    rows,
                    self.say("attack_table", method=short_name(facts.sharpest)),
                    numeric=True,
                ),
            ],
        )

    def losses(self) -> Section:
        facts = self.facts
        rows = []
        for name, value in facts.epsilons.items():
            label = self.say(f"accountant_{name}")
            if name == facts.accountant:
                label = self.say("used_by_run", name=label)
            rows.append((label, self.epsilon(value)))
        intervals = [v.interval for v in facts.verifications if v.interval is not None]
        if len(intervals) == 1:
            low, high = self.number(intervals[0].low), self.number(intervals[0].high)
            shown = self.say("independent_both", low=low, high=high) if intervals[0].tight else ""
            rows.append((self.say("independent"), shown or self.say("independent_low", low=low)))
        charts: list[Block] = []
        if len(facts.trajectory) > 1:
            points = tuple((float(step), value) for step, value in facts.trajectory)
            limit = None if facts.max_epsilon is None else (self.say("limit_line"), facts.max_epsilon)
            charts.append(
                Chart(
                    self.say("chart_steps"),
                    self.say("axis_step"),
                    self.say("axis_epsilon"),
                    (("", points),),
                    limit=limit,
                )
            )
        curves = tuple(
            (short_name(name), tuple(zip(facts.deltas, values))) for name, values in facts.epsilon_of_delta.items()
        )
        charts.append(
            Chart(self.say("chart_deltas"), self.say("axis_delta"), self.say("axis_epsilon"), curves, log_x=True)
        )
        head = (self.say("accountant"), self.say("epsilon_at", delta=self.number(facts.delta)))
        table = Table(head, tuple(rows), numeric=True)
        return Section(self.say("epsilon_section"), [table, Paragraph(self.say("epsilon_note")), *charts])

    def groups(self) -> Section:
        facts = self.facts
        rows = tuple((str(size), self.epsilon(value)) for size, value in facts.groups)
        head = (
            self.say("groups_rows"),
            self.say("groups_epsilon", delta=self.number(facts.delta), method=short_name(facts.sharpest)),
        )
        return Section(self.say("groups"), [Paragraph(self.say("groups_note")), Table(head, rows, numeric=True)])

    def tuning(self) -> Section:
        facts, tuning = self.facts, self.facts.tuning
        sentence = self.say(
            f"tuning_{tuning.method}",
            **(
                {}
                if tuning.method == "none"
                else {
                    "runs": len(tuning.ledgers),
                    "mean": f"{tuning.mean_runs:g}",
                    "eta": f"{tuning.eta:g}",
                    "before": self.epsilon(facts.epsilon_without_tuning),
                    "after": self.epsilon(facts.epsilon),
                }
            ),
        )
        return Section(self.say("tuning"), [Paragraph(sentence, "caution" if tuning.method == "none" else "")])

    def audit(self) -> Section:
        audit = self.facts.audit
        if audit is None:
            return Section(self.say("audit"))
        blocks: list[Block] = [Paragraph(self.say("audit_note"))]
        bars = []
        claimed = audit.get("epsilon", self.facts.epsilon)
        claimed = math.inf if claimed == "inf" else float(claimed)
        for bound in audit.get("bounds", ()):
            found = self.say(
                "audit_bound",
                low=f"{bound['epsilon']:.3f}",
                confidence=f"{bound['confidence']:.0%}",
                canaries=bound["canaries"],
                high=self.epsilon(claimed),
            )
            blocks.append(Paragraph(f"**{bound['name']}**: {found}"))
            bars.append((f"ε̂ ≥ {bound['epsilon']:.3f}, {bound['name']}", bound["epsilon"]))
        if bars:
            bars.append((f"ε ≤ {self.epsilon(claimed)}", claimed))
            blocks.append(Bars(self.say("audit_chart"), tuple(bars)))
        rows = []
        for attack in audit.get("attacks", ()):
            low, high = attack["auc_interval"]
            cells = [attack["name"], f"{attack['auc']:.3f} ({low:.3f} – {high:.3f})"]
            for point in attack["points"]:
                if point["false_positive_rate"] in (0.01, 0.1):
                    low, high = point["interval"]
                    cells.append(f"{point['true_positive_rate']:.1%} ({low:.1%} – {high:.1%})")
            rows.append(tuple(cells))
        if rows:
            head = (
                self.say("audit_attack"),
                self.say("audit_auc"),
                *(self.say("audit_tpr", rate=percent(rate)) for rate in (0.01, 0.1)),
            )
            blocks.append(Table(head, tuple(rows), numeric=True))
        return Section(self.say("audit"), blocks)

    def utility(self) -> Section:
        rows = self.facts.utility
        if not rows:
            return Section(self.say("utility"))
        head = tuple(dict.fromkeys(key for row in rows for key in row))
        body = tuple(tuple(self.cell(row.get(key)) for key in head) for row in rows)
        return Section(
            self.say("utility"), [Table(tuple(map(str, head)), body, numeric=True), Paragraph(self.say("utility_note"))]
        )

    def cell(self, value: Any) -> str:
        if value is None:
            return "–"
        return self.number(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)

    def setup(self) -> Section:
        section = Section(self.say("setup"))
        index = 0
        total = sum(len(v.contents.runs) for v in self.facts.verifications)
        for verification in self.facts.verifications:
            for run in describe_ledger(verification)["runs"]:
                index += 1
                rows = [
                    (self.say(f"field_{name}"), self.header_value(name, value, run["declared_sampling"]))
                    for name, value in run["header"].items()
                ]
                rows += [
                    (self.say("field_steps"), self.number(run["steps"])),
                    (self.say("field_started"), str(run["started"]).replace("+00:00", "").replace("T", " ")),
                    (self.say("field_ended"), (run["ended"] or "–").replace("+00:00", "").replace("T", " ")),
                    (self.say("field_closed"), self.say("yes" if run["closed"] else "no")),
                ]
                caption = self.say("run", number=index) if total > 1 else ""
                section.blocks.append(Table((), tuple(rows), caption))
        return section

    def header_value(self, name: str, value: Any, declared: bool) -> str:
        known = texts(self.language)
        if name == "sampling":
            shown = known.get(f"sampling_{value}", str(value))
            return self.say("sampling_declared", sampling=shown) if declared else shown
        if name == "noise":
            kind = value.get("kind") if isinstance(value, dict) else value
            if isinstance(value, dict) and value.get("secure") is False:
                return self.say("noise_seeded_short")
            return known.get(f"noise_{kind}", str(kind))
        return self.cell(value)

    def public(self) -> Section:
        section = Section(self.say("public_section"))
        for name, points in self.facts.public.items():
            series = (("", tuple((float(step), value) for step, value in points)),)
            section.blocks.append(Chart(name, self.say("axis_step"), name, series))
        if section.blocks:
            section.blocks.insert(0, Paragraph(self.say("public_note")))
        return section

    def limits(self) -> Section:
        keys = ("tuning", "duplicates", "pretraining", "evaluation", "inference", "side", "ledger")
        return Section(self.say("limits"), [Bullets(tuple(self.say(f"limit_{key}") for key in keys))])

    def integrity(self) -> Section:
        section = Section(self.say("integrity"))
        commands = []
        for verification in self.facts.verifications:
            described = describe_ledger(verification)
            rows = (
                (self.say("ledger"), described["name"]),
                (self.say("receipt"), described["receipt"]),
                (self.say("records"), self.number(described["records"])),
                (self.say("recorded"), self.epsilon(verification.recorded)),
                (self.say("recomputed"), self.epsilon(verification.recomputed)),
            )
            section.blocks.append(Table((), rows))
            problems = tuple(
                self.say("line", line=found.line, problem=self.say(found.code, **found.values))
                for found in verification.problems
            )
            if problems:
                section.blocks += [Paragraph(self.say("problems"), "warning"), Bullets(problems)]
            notes = tuple(self.say(note.code, **note.values) for note in verification.notes)
            if notes:
                section.blocks += [Paragraph(self.say("notes")), Bullets(notes)]
            commands.append(f"paddle-privacy verify {described['name']} --receipt {described['receipt']}")
        section.blocks += [Paragraph(self.say("check_with")), Code("\n".join(commands))]
        return section

    def environment(self) -> Section:
        run = self.facts.verifications[-1].contents.runs[-1]
        rows: list[tuple[str, str]] = []
        platform, versions, code = (run.header.get(name) for name in ENVIRONMENT_FIELDS)
        if platform:
            rows.append((self.say("platform"), str(platform)))
        rows += [(str(name), str(version)) for name, version in (versions or {}).items()]
        if code:
            modified = self.say("code_modified") if code.get("modified") else ""
            rows.append((self.say("code"), self.say("code_value", commit=code["commit"], modified=modified)))
        return Section(self.say("environment"), [Table((), tuple(rows))] if rows else [])
