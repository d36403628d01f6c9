"""Commands that prove things: ``report``, ``verify``, ``export``, ``audit``, ``selftest``.

Exit status: 0 when it holds, 1 when it does not (damaged ledger, limit passed, claim refuted, check failed), 2 for bad
arguments.
"""

# typer evaluates the annotations, and Python 3.9 has no "X | None" at run time.
# ruff: noqa: UP045

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from .errors import LedgerError, PrivacyError

LEDGER_NAME = "ledger.jsonl"


def verify(
    ledger: Annotated[Path, typer.Argument(help="ledger.jsonl, or a run folder that holds one")],
    delta: Annotated[Optional[float], typer.Option(help="δ of the total (default: the run's own)")] = None,
    max_epsilon: Annotated[Optional[float], typer.Option(help="fail above this ε")] = None,
    receipt: Annotated[Optional[str], typer.Option(help="<records>:<hash> noted earlier")] = None,
    no_head: Annotated[bool, typer.Option("--no-head", help="accept a ledger without its .head file")] = False,
) -> None:
    """Check a ledger's hash chain, and compute ε again from its events by two independent methods."""
    from .report.text import text
    from .verify.check import verify_ledger

    with _findings():
        result = verify_ledger(_ledger_of(ledger), delta=delta, receipt=receipt, require_head=not no_head)
    contents = result.contents
    print(f"{contents.path}: {len(contents.runs)} run(s), {contents.steps} steps, {contents.records} records")
    print(f"  receipt      {contents.receipt}")
    print(f"  recorded     ε = {result.recorded:.6g}")
    if result.delta is not None:
        print(f"  recomputed   ε = {result.recomputed:.6g} at δ={result.delta:g} ({result.accountant})")
        assert result.interval is not None
        upper = f" .. {result.interval.high:.6g}" if result.interval.tight else " or more"
        print(f"  independent  ε = {result.interval.low:.6g}{upper}")
    for note in result.notes:
        print(f"  note: {text('en', note.code, **note.values)}")
    for found in result.problems:
        print(f"{contents.path}, line {found.line}: {text('en', found.code, **found.values)}", file=sys.stderr)
    if result.problems:
        raise typer.Exit(1)
    if max_epsilon is not None:
        if result.delta is None:
            raise ValueError("--max-epsilon needs --delta, since the run was given none")
        if not result.epsilon <= max_epsilon:
            _fail(f"ε = {result.epsilon:.6g} is above the limit of {max_epsilon:g}")
    print("  verified")


def report(
    runs: Annotated[list[Path], typer.Argument(help="run folders or ledgers about the same data")],
    output: Annotated[Path, typer.Option("--output", "-o", help="file to write")] = Path("report.html"),
    format: Annotated[Optional[str], typer.Option(help="html, md, json or pdf (default: by the file's name)")] = None,
    lang: Annotated[str, typer.Option(help="en or zh")] = "en",
    delta: Annotated[Optional[float], typer.Option(help="δ of the total (default: the run's own)")] = None,
    max_epsilon: Annotated[Optional[float], typer.Option(help="the limit to compare with")] = None,
    tuning: Annotated[str, typer.Option(help="none, composition or papernot-steinke")] = "none",
    tuning_run: Annotated[Optional[list[Path]], typer.Option(help="a tuning run, for composition; repeatable")] = None,
    mean_runs: Annotated[float, typer.Option(help="mean of the random number of runs, for papernot-steinke")] = 1.0,
    eta: Annotated[float, typer.Option(help="shape of its law, for papernot-steinke")] = 1.0,
    audit: Annotated[Optional[Path], typer.Option(help="JSON written by paddle-privacy audit")] = None,
    title: Annotated[str, typer.Option(help="heading of the report")] = "",
) -> None:
    """Write a report for people who were not there: what was protected, how well, and what is not covered."""
    from .report import Tuning, collect, write_report

    ledgers = [_ledger_of(run) for run in runs]
    others = tuple(_ledger_of(run) for run in tuning_run or ())
    how = Tuning(tuning.replace("-", "_"), others, mean_runs, eta)
    found = audit or next((run / "audit.json" for run in runs if (run / "audit.json").is_file()), None)
    with _findings():
        facts = collect(
            ledgers,
            delta=delta,
            max_epsilon=max_epsilon,
            tuning=how,
            utility=[row for run in runs for row in _utility_of(run)],
            audit=None if found is None else json.loads(found.read_text(encoding="utf-8")),
            title=title,
        )
        try:
            written = write_report(facts, output, format, lang)
        except (ImportError, RuntimeError) as error:
            raise ValueError(str(error)) from error
    print(f"{output} ({written}): ε = {facts.epsilon:.4g} at δ={facts.delta:g}, {facts.relation.replace('_', ' ')}")


def export(
    model: Annotated[str, typer.Option(help="builds the model: module:function or file.py:function")],
    weights: Annotated[Path, typer.Option(help=".pdparams of the trained model")],
    input_spec: Annotated[list[str], typer.Option(help="an input as SHAPE:DTYPE, e.g. '-1,128:int64'; repeatable")],
    ledger: Annotated[list[Path], typer.Option(help="the run's ledger or folder; repeatable")],
    max_epsilon: Annotated[float, typer.Option(help="refuse above this ε")],
    delta: Annotated[float, typer.Option(help="δ at which ε is meant")],
    output: Annotated[Path, typer.Option("--output", "-o", help="prefix of the exported files")],
) -> None:
    """Verify the ledger, and only if ε is within the limit write Paddle Inference files, manifest and report."""
    import paddle
    from paddle.static import InputSpec

    from .release import export_for_inference

    layer = _function(model)()
    missing, unexpected = layer.set_state_dict(paddle.load(str(weights)))
    if missing or unexpected:
        raise ValueError(f"weights {weights} do not fit the model: missing {missing}, unexpected {unexpected}")
    specs = []
    for spec in input_spec:
        shape, separator, dtype = spec.rpartition(":")
        if not separator:
            raise ValueError(f"input-spec is {spec!r}; it must be SHAPE:DTYPE, e.g. -1,128:int64")
        sizes = [None if int(size) < 0 else int(size) for size in shape.split(",") if size]
        specs.append(InputSpec(sizes, dtype))  # type: ignore[arg-type]
    with _findings():
        manifest = export_for_inference(layer, specs, output, [_ledger_of(path) for path in ledger], max_epsilon, delta)
    print(f"{output}: released with ε = {manifest['epsilon']:.4g} <= {max_epsilon:g} at δ={delta:g}")
    for name in manifest["files"]:
        print(f"  {name}")


def audit(
    target: Annotated[
        Optional[str],
        typer.Argument(help="file.py:function or module:function; without it, gradient canaries through DPSGD"),
    ] = None,
    canaries: Annotated[int, typer.Option(help="rows whose membership is decided by a fair coin each")] = 1000,
    confidence: Annotated[float, typer.Option(help="chance that no ε̂ is above the true ε")] = 0.95,
    noise_multiplier: Annotated[float, typer.Option(help="σ, without a target")] = 1.0,
    sample_rate: Annotated[float, typer.Option(help="Poisson rate, 1 for full batches, without a target")] = 1.0,
    steps: Annotated[int, typer.Option(help="noisy updates, without a target")] = 4,
    delta: Annotated[float, typer.Option(help="δ of the claim, without a target")] = 1e-5,
    output: Annotated[Path, typer.Option("--output", "-o", help="JSON, for paddle-privacy report --audit")] = Path(
        "audit.json"
    ),
) -> None:
    """Attack a training run: a lower limit ε̂ on its privacy loss, against the ε it claims.

    A target is a function that takes the coins (a boolean vector, True = put this canary into the training data),
    trains, and returns a paddle_privacy.audit.ScoredRun.
    """
    from .audit import audit_mechanism, flip_coins, judge

    if target is None:
        result = audit_mechanism(
            noise_multiplier=noise_multiplier,
            steps=steps,
            sample_rate=sample_rate,
            delta=delta,
            canaries=canaries,
            confidence=confidence,
        )
    else:
        coins = flip_coins(canaries)
        result = judge(_function(target)(coins), coins, confidence, audit=target)
    output.write_text(json.dumps(result.to_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    _draw_audit(result)
    if result.refuted:
        _fail(f"the claim is false: ε̂ = {result.best:.3f} is above ε = {result.epsilon:.3f}")


def selftest(
    ranks: Annotated[bool, typer.Option(help="also compare two fresh processes")] = True,
) -> None:
    """Measure on this machine and device: noise scale, independence, clipping, ledger, and an attack."""
    import paddle

    from .selftest import print_checks, run_selftest

    if not print_checks(run_selftest(ranks), paddle.get_device()):
        raise typer.Exit(1)


def _draw_audit(result: Any) -> None:
    """ε̂ of each attack and the claimed ε on one scale."""
    rows = [(name, bound.epsilon, "at least") for name, bound in result.bounds.items()]
    rows.append((f"claimed ε at δ={result.delta:g}", result.epsilon, "at most"))
    width = max(len(name) for name, _, _ in rows)
    finite = [value for _, value, _ in rows if value < float("inf")]
    scale = 40 / max(max(finite, default=1.0), 1e-9)
    for name, value, kind in rows:
        bar = "#" * round(min(value, max(finite, default=1.0)) * scale)
        print(f"  {name:<{width}}  {kind:<8} {value:8.3f}  {bar}")
    for attack in result.attacks:
        low, high = attack.auc_interval
        print(f"  {attack.name}: AUC {attack.auc:.3f} ({low:.3f} .. {high:.3f}), {attack.members} of ", end="")
        print(f"{attack.members + attack.nonmembers} canaries were in the data")


class _findings:
    """Turns what a check found into one line and exit status 1."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, (LedgerError, PrivacyError)):
            _fail(str(error))


def _fail(message: str) -> None:
    print(f"paddle-privacy: {message}", file=sys.stderr)
    raise typer.Exit(1)


def _ledger_of(run: Path) -> Path:
    return run / LEDGER_NAME if run.is_dir() else run


def _utility_of(run: Path) -> list[dict[str, Any]]:
    """``utility.json`` of a run folder (a list of rows), or what its ``summary.json`` says about the test set."""
    if not run.is_dir():
        return []
    table, summary = run / "utility.json", run / "summary.json"
    if table.is_file():
        return list(json.loads(table.read_text(encoding="utf-8")))
    if summary.is_file():
        content = json.loads(summary.read_text(encoding="utf-8"))
        return [{"metric": key, "value": content[key]} for key in sorted(content) if key.startswith("test_")]
    return []


def _function(name: str) -> Any:
    """The function that ``module:function`` or ``file.py:function`` names."""
    source, separator, function = name.rpartition(":")
    if not separator or not source:
        raise ValueError(f"{name!r} must be module:function or file.py:function")
    if source.endswith(".py"):
        if not Path(source).is_file():
            raise ValueError(f"{source} does not exist")
        spec = importlib.util.spec_from_file_location(Path(source).stem, source)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # A recipe imports its neighbours, as when it is run as a script.
        sys.path.insert(0, str(Path(source).resolve().parent))
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(source)
    if not hasattr(module, function):
        raise ValueError(f"{source} has no function {function!r}")
    return getattr(module, function)
