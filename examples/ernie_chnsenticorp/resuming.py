"""`--resume`: what a run needs to go on after Ctrl-C, kill -9 or a power cut, with the budget it has left.

Steps that were taken after the last checkpoint are lost to the weights. Their noisy updates were released all the same,
so they stay in the ledger, ε keeps them, and the run ends after the number of steps it was planned for. Noise and
batches are drawn afresh: repeating either would break the guarantee. (Without privacy, the rest of an epoch comes from
a fresh shuffle.)
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from averaging import MovingAverage
    from loop import Training
    from run_folder import RunFolder
    from task import Task

CHANGEABLE = frozenset({"resume", "physical_batch_size", "state_cache"})
"""Flags that may differ from the interrupted run's: they change neither what is trained nor ε."""


class ResumeError(Exception):
    """The run cannot go on; the message says why."""


def restored_flags(given: dict[str, Any], defaults: dict[str, Any], run: Path) -> argparse.Namespace:
    """The flags of the run in the folder ``run``.

    Args:
        given: flags named on the command line now.
        defaults: of all flags, for those that the run did not know.

    Raises:
        ResumeError: the folder holds no run, or a flag was given that is not the run's.
    """
    try:
        flags = json.loads((run / "config.json").read_text(encoding="utf-8"))["flags"]
    except FileNotFoundError:
        raise ResumeError(f"--resume {run}: no config.json there, so no run began in it; start one anew") from None
    except (OSError, ValueError, KeyError) as error:
        raise ResumeError(f"--resume {run}: config.json cannot be read ({error}); restore it") from error
    for name, value in given.items():
        if name not in CHANGEABLE and value != flags.get(name, defaults.get(name)):
            raise ResumeError(
                f"--resume goes on with the run's own flags: --{name.replace('_', '-')} is "
                f"{flags.get(name, defaults.get(name))} there, not {value}; leave it out, or start a new run"
            )
    kept = {name: given[name] for name in CHANGEABLE & given.keys()}
    if flags.get("state_cache") is not None:
        flags["state_cache"] = Path(flags["state_cache"])
    return argparse.Namespace(**{**defaults, **flags, **kept, "resume": run, "output": run})


class Checkpoints:
    """The one checkpoint of a run: trained weights, optimizer with its account, learning rate, moving average.

    Each :meth:`save` replaces the last one in one move, so whenever the process dies a whole one is there.
    """

    def __init__(self, path: Path, task: Task, training: Training) -> None:
        self.path = path
        self.training = training
        self._weights: Any = _Weights(task, training.average)

    @property
    def exists(self) -> bool:
        from paddle_privacy.checkpoint import MANIFEST

        return (self.path / MANIFEST).is_file()

    def save(self) -> None:
        from paddle_privacy.checkpoint import save_checkpoint

        training = self.training
        extra = {
            "seconds": training.seconds,
            "steps": training.steps_taken,
            "averaged_steps": None if training.average is None else training.average.steps,
        }
        save_checkpoint(self.path, model=self._weights, optimizer=training.optimizer, extra=extra)

    def load(self) -> int:
        """Restores the run; returns how many steps after the checkpoint are lost.

        The learning rate goes on from the steps that were taken, lost ones included, and so ends as planned.

        Raises:
            paddle_privacy.PrivacyError: the checkpoint or the ledger is damaged, or of another model.
        """
        from paddle_privacy.checkpoint import load_checkpoint

        training = self.training
        extra = load_checkpoint(self.path, model=self._weights, optimizer=training.optimizer)
        spending = getattr(training.optimizer, "spending", None)
        taken = extra["steps"] if spending is None else spending.steps
        training.schedule.step(taken)
        training.seconds = extra["seconds"]
        if training.average is not None:
            training.average.steps = extra["averaged_steps"]
        return int(taken - extra["steps"])

    def remove(self) -> None:
        """After the last planned step there is nothing to go on with."""
        shutil.rmtree(self.path, ignore_errors=True)


class _Weights:
    """What a checkpoint holds of the network: parameters that are trained, by their path, and their average.

    Frozen ones are those of the original model, which a resumed run loads anyway.
    """

    def __init__(self, task: Task, average: MovingAverage | None) -> None:
        trained = {id(parameter) for parameter in task.trained_parameters}
        named = task.network.named_parameters()
        self._parameters = {name: parameter for name, parameter in named if id(parameter) in trained}
        averages = [] if average is None else average.average
        self._averages = {f"average {number}": tensor for number, tensor in enumerate(averages)}

    def named_parameters(self) -> list[tuple[str, Any]]:
        return list(self._parameters.items())

    def state_dict(self) -> dict[str, Any]:
        return {**self._parameters, **self._averages}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.set_value(state[name])


def refuse_where_nothing_is_left(folder: RunFolder) -> None:
    """
    Raises:
        ResumeError: the run in the folder has ended.
    """
    summary = folder.read_json("summary.json")
    if summary.get("ended") in ("completed", "budget spent"):
        raise ResumeError(
            f"--resume {folder.path}: this run has ended ({summary['ended']} after {summary['steps']} steps); training "
            "on would be a new run with a budget of its own"
        )


def refuse_other_data(folder: RunFolder, rows: int) -> None:
    """
    Raises:
        ResumeError: the training file has changed its size. Its content is not compared: a digest of it, kept in the
            run folder, would confirm to anyone who knows all rows but one whether that one is in it.
    """
    before = folder.read_json("config.json")["training_rows"]
    if rows != before:
        raise ResumeError(
            f"--resume {folder.path}: the run began with {before} training rows, now there are {rows}; its noise and ε "
            "are about the former, so restore them, or start a new run"
        )
