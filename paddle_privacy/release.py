"""The gate in front of production: no ledger, no export.

:func:`export_for_inference` verifies the ledger, recomputes ε, refuses above the limit, and only then writes the Paddle
Inference files, the report, and a manifest that ties them together by hash: the model's files, the ledger's receipt, ε,
δ and the limit. :func:`check_release` is what the receiving side runs.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import PrivacyBudgetExceeded, PrivacyError
from .gradients.hooks import LayerHooks
from .ledger import parameter_fingerprint
from .report import Facts, Tuning, collect, write_report
from .report.text import text
from .verify.chain import PathLike
from .version import __version__

MANIFEST_FORMAT = "paddle_privacy.release/1"


def export_for_inference(
    model: Any,
    input_spec: Sequence[Any],
    path: PathLike,
    ledger: PathLike | Sequence[PathLike],
    max_epsilon: float,
    delta: float,
    tuning: Tuning | None = None,
    languages: Sequence[str] = ("en", "zh"),
) -> dict[str, Any]:
    """Writes the Paddle Inference files at ``path``, ``<path>.manifest.json`` and ``<path>.report.<language>.html``.

    Args:
        model: the trained ``paddle.nn.Layer``; exported in evaluation mode, its mode is restored.
        input_spec: as for ``paddle.jit.save``.
        path: prefix of the files. Nothing appears there when the export is refused or fails.
        ledger: the run's ledger, or all ledgers about the same data.
        max_epsilon, delta: the limit.
        tuning: how hyper-parameters were chosen, for the report and its ε.
        languages: of the report.

    Returns:
        The manifest.

    Raises:
        BrokenLedger, LedgerError: a ledger is damaged, missing, or cannot be composed.
        PrivacyError: the ledger contradicts its own events, its noise came from a seed, it holds no step, or it is not
            about this model.
        PrivacyBudgetExceeded: ε at ``delta`` is above ``max_epsilon``.
    """
    ledgers = [ledger] if isinstance(ledger, (str, os.PathLike)) else list(ledger)
    facts = collect(ledgers, delta=delta, max_epsilon=max_epsilon, tuning=tuning)
    check_facts(facts)
    _check_model(facts, model)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Written aside and moved when complete: a half-written export must not look like a released one.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        _save_inference_model(model, input_spec, Path(folder, target.name))
        for language in languages:
            write_report(facts, Path(folder, f"{target.name}.report.{language}.html"), "html", language)
        manifest = _manifest(facts, Path(folder))
        Path(folder, f"{target.name}.manifest.json").write_text(
            json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        # The manifest last: its presence says that the rest is there.
        for name in sorted(os.listdir(folder), key=lambda name: name.endswith(".manifest.json")):
            shutil.move(os.path.join(folder, name), os.path.join(target.parent, name))
    return manifest


def check_facts(facts: Facts) -> None:
    """What must hold of the ledgers before anything is released; see :func:`export_for_inference` for the errors."""
    for verification in facts.verifications:
        for found in verification.problems:
            problem = text("en", found.code, **found.values)
            raise PrivacyError(
                f"ledger {verification.contents.path}, line {found.line}: {problem}; nothing is released on a ledger "
                "that contradicts itself"
            )
    if facts.seeded:
        raise PrivacyError(
            "the ledger says that the noise was drawn from a seed, so it can be removed; train again with the system's "
            "randomness (secure=True)"
        )
    if not facts.steps:
        raise PrivacyError("the ledger holds no step; it is not the ledger of a trained model")
    assert facts.max_epsilon is not None
    if not facts.epsilon <= facts.max_epsilon:
        raise PrivacyBudgetExceeded(
            f"ε = {facts.epsilon:.4f} at δ={facts.delta:g} is above the limit of {facts.max_epsilon:g}; the model must "
            "not be released"
        )


def _check_model(facts: Facts, model: Any) -> None:
    """The last run's model must have the shape of the exported one, where the ledger says what that was."""
    recorded = facts.verifications[0].contents.runs[-1].header.get("model_fingerprint")
    if recorded is None:
        return
    parameters = list(model.parameters())
    trained = parameter_fingerprint(p for p in parameters if not p.stop_gradient)
    if recorded not in (trained, parameter_fingerprint(parameters)):
        raise PrivacyError(
            f"the ledger is about a model with fingerprint {recorded[:12]}…, this one has {trained[:12]}… (shapes or "
            "dtypes of the trained parameters differ); export the model that was trained, frozen as it was then"
        )


def _save_inference_model(model: Any, input_spec: Sequence[Any], prefix: Path) -> None:
    import paddle

    training = model.training
    model.eval()
    try:
        with _without_taps(model):
            paddle.jit.save(model, str(prefix), input_spec=list(input_spec))
    finally:
        if training:
            model.train()


@contextmanager
def _without_taps(model: Any) -> Iterator[None]:
    """The model without the optimizer's hooks: they capture gradients, which Paddle's static graph cannot run."""
    saved = []
    for layer in model.sublayers(include_self=True):
        for hooks in (layer._forward_pre_hooks, layer._forward_post_hooks):
            before = list(hooks.items())
            saved.append((hooks, before))
            for key, hook in before:
                if isinstance(getattr(hook, "__self__", None), LayerHooks):
                    del hooks[key]
    try:
        yield
    finally:
        for hooks, before in saved:
            hooks.clear()
            hooks.update(before)


def _manifest(facts: Facts, folder: Path) -> dict[str, Any]:
    return {
        "format": MANIFEST_FORMAT,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "paddle_privacy": __version__,
        "epsilon": facts.epsilon,
        "delta": facts.delta,
        "max_epsilon": facts.max_epsilon,
        "accountant": facts.accountant,
        "unit": facts.unit,
        "relation": facts.relation,
        "tuning": facts.tuning.method,
        "ledgers": [
            {"ledger_id": v.contents.ledger_id, "receipt": v.contents.receipt, "steps": v.contents.steps}
            for v in facts.verifications
        ],
        "files": {name: _sha256(folder / name) for name in sorted(os.listdir(folder))},
    }


def check_release(path: PathLike, max_epsilon: float | None = None) -> dict[str, Any]:
    """The receiving side: every file is the one that the manifest names, and ε is within the limit.

    Args:
        path: the prefix given to :func:`export_for_inference`.
        max_epsilon: the receiver's own limit; the manifest's when None.

    Raises:
        PrivacyError: a file is missing or was changed, or there is no valid manifest.
        PrivacyBudgetExceeded: ε is above the limit.
    """
    prefix = Path(path)
    source = prefix.with_name(prefix.name + ".manifest.json")
    try:
        manifest = json.loads(source.read_text(encoding="utf-8"))
        files, epsilon, limit = dict(manifest["files"]), float(manifest["epsilon"]), float(manifest["max_epsilon"])
        known = manifest["format"] == MANIFEST_FORMAT
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PrivacyError(f"release {prefix} has no valid manifest ({error}); it did not pass the gate") from error
    if not known:
        raise PrivacyError(
            f"release {prefix} has format {manifest['format']!r}; this version reads {MANIFEST_FORMAT!r}"
        )
    for name, digest in files.items():
        file = prefix.parent / os.path.basename(name)
        if not file.is_file() or _sha256(file) != digest:
            raise PrivacyError(f"{file} is missing or is not the file that passed the gate")
    strays = [
        file.name
        for file in prefix.parent.glob(f"{prefix.name}.*")
        if file.suffix in (".pdmodel", ".pdiparams", ".json") and file.name not in files and file != source
    ]
    if strays:
        raise PrivacyError(
            f"{', '.join(sorted(strays))} beside the release did not pass the gate; remove or export again"
        )
    bound = limit if max_epsilon is None else max_epsilon
    if not epsilon <= bound:
        raise PrivacyBudgetExceeded(f"ε = {epsilon:.4f} of release {prefix} is above the limit of {bound:g}")
    return manifest


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()
