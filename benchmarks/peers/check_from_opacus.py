"""Holds the Opacus side of docs/from_opacus.md against the Opacus that is installed.

    PEER/bin/python benchmarks/peers/check_from_opacus.py

PEER: an environment with torch and opacus. Runs the page's "before" program, then one check for each statement in the
table's middle column that a program can decide; looks up the names. Ends with status 1 if anything is not as stated.
"""

from __future__ import annotations

import importlib
import io
import logging
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import opacus
import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.validators import ModuleValidator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset, WeightedRandomSampler

PAGE = (Path(__file__).parents[2] / "docs" / "from_opacus.md").read_text(encoding="utf-8")
CHECKS: list[Callable[[], None]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function)
    return function


def rows(number: int) -> TensorDataset:
    return TensorDataset(torch.randn(number, 3), torch.randint(0, 2, (number,)))


def private(loader: DataLoader, model: nn.Module | None = None, accountant: str = "rdp", **arguments: Any) -> Any:
    """The engine, and what ``make_private`` returns."""
    model = nn.Linear(3, 2) if model is None else model
    engine = PrivacyEngine(accountant=accountant)
    arguments = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, **arguments}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return engine, engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **arguments)


def epoch(model: Any, optimizer: Any, loader: Any) -> None:
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def refused(error: type[Exception], call: Callable[[], Any], said: str = "") -> None:
    try:
        call()
    except error as refusal:
        assert said in str(refusal), refusal
    else:
        raise AssertionError(f"accepted; {error.__name__} was expected")


@check
def the_program_before() -> None:
    (program,) = re.findall(r"```text\n(import torch\n.*?)```", PAGE, flags=re.S)
    said = io.StringIO()
    dataset = TensorDataset(torch.randn(300, 1, 8, 8), torch.randint(0, 4, (300,)))
    with redirect_stdout(said):
        exec(compile(program, "docs/from_opacus.md", "exec"), {"dataset": dataset})
    first, last = (float(line) for line in said.getvalue().split())
    assert 0 < first < last <= 3.0


@check
def keys_gain_a_prefix_where_the_model_is_wrapped() -> None:
    _, (model, optimizer, _) = private(DataLoader(rows(100), batch_size=10))
    assert list(model.state_dict()) == ["_module.weight", "_module.bias"]
    assert type(optimizer).__name__ == "DPOptimizer" and type(optimizer.original_optimizer) is torch.optim.SGD
    _, (hooks, _, _) = private(DataLoader(rows(100), batch_size=10), wrap_model=False)
    assert not isinstance(hooks, nn.Module)


@check
def an_optimizer_that_has_stepped_is_accepted() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    loader = DataLoader(rows(100), batch_size=10)
    _, made, _ = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )
    assert len(made.state) == 2


@check
def fix_returns_a_copy_with_groups_of_one_channel() -> None:
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.BatchNorm2d(64))
    fixed = ModuleValidator.fix(model)
    assert fixed is not model and fixed[0].weight is not model[0].weight
    assert (fixed[1].num_groups, fixed[2].num_groups) == (16, 32)


@check
def rate_and_steps_of_an_epoch() -> None:
    for drop_last, rate in ((False, 0.5), (True, 1.0)):
        _, (_, optimizer, loader) = private(DataLoader(rows(100), batch_size=64, drop_last=drop_last))
        assert loader.sample_rate == rate
        assert optimizer.expected_batch_size == 100 * rate
    _, (_, _, loader) = private(DataLoader(rows(93), batch_size=1))
    assert len(loader) == len(list(loader)) == 92


@check
def custom_samplers_are_replaced_without_a_word() -> None:
    data = rows(100)
    weighted = WeightedRandomSampler([1.0] * 99 + [100.0], 100)
    for loader in (
        DataLoader(data, batch_size=10, sampler=weighted),
        DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 10, False)),
    ):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            _, (_, _, made) = private(loader)
        assert type(made.batch_sampler).__name__ == "UniformWithReplacementSampler"
        assert not [w for w in said if "ampler" in str(w.message)]


@check
def without_poisson_sampling_the_epsilon_is_the_same() -> None:
    loader = DataLoader(rows(100), batch_size=10)
    epsilon = []
    for poisson in (True, False):
        engine, (model, optimizer, made) = private(loader, poisson_sampling=poisson)
        epoch(model, optimizer, made)
        epsilon.append(engine.get_epsilon(1e-5))
    assert epsilon[0] == epsilon[1]


@check
def empty_batches() -> None:
    data = rows(100)

    def with_names(batch: list) -> dict:
        return {"x": torch.stack([x for x, _ in batch]), "names": [str(y) for _, y in batch]}

    _, (_, _, loader) = private(DataLoader(data, batch_size=1))
    assert min(len(x) for x, _ in loader) == 0  # fails by chance with probability (1 - 0.99^100)^100 < 1e-19
    _, (_, _, loader) = private(DataLoader(data, batch_size=1, collate_fn=with_names))
    refused(TypeError, lambda: list(loader), "Unsupported batch type: str")
    refused(RuntimeError, lambda: nn.Linear(3, 2)(torch.zeros(0, 3).reshape(0, -1)), "cannot reshape")


@check
def pieces_of_a_batch_that_was_left_join_the_next() -> None:
    _, (model, optimizer, loader) = private(DataLoader(rows(1000), batch_size=500))
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=64, optimizer=optimizer) as pieces:
        for number, (inputs, labels) in enumerate(pieces):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            if number == 2:
                break
        left = optimizer.params[0].summed_grad.clone()
        next(iter(pieces))
        optimizer.zero_grad()
        assert torch.equal(optimizer.params[0].summed_grad, left)


@check
def backward_twice() -> None:
    loader, inputs, labels = DataLoader(rows(100), batch_size=10), torch.randn(2, 4, 3), torch.zeros(4).long()
    _, (model, _, _) = private(loader)
    model(inputs[0]).sum().backward()
    refused(ValueError, lambda: model(inputs[1]).sum().backward(), "Poisson sampling is not compatible")
    _, (model, _, criterion, _) = private(loader, grad_sample_mode="ghost", max_grad_norm=1e6)

    def gradient(*batches: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        for batch in batches:
            criterion(model(batch), labels).backward()
        return model._module.weight.grad.clone()

    torch.testing.assert_close(gradient(inputs[0], inputs[1]), gradient(inputs[1]))


@check
def accountants() -> None:
    assert PrivacyEngine().accountant.mechanism() == "prv"
    for name in ("rdp", "gdp"):
        assert PrivacyEngine(accountant=name).accountant.mechanism() == name


@check
def epsilon_grows_past_the_target() -> None:
    engine, model = PrivacyEngine(accountant="rdp"), nn.Linear(3, 2)
    made = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(rows(100), batch_size=10),
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=1,
        max_grad_norm=1.0,
    )
    epoch(*made)
    assert engine.get_epsilon(1e-5) <= 3.0
    epoch(*made)
    assert engine.get_epsilon(1e-5) > 3.0


@check
def secure_mode_needs_torchcsprng() -> None:
    if importlib.util.find_spec("torchcsprng") is None:
        refused(ImportError, lambda: PrivacyEngine(secure_mode=True), "torchcsprng")


@check
def clipping_and_modes() -> None:
    loader = DataLoader(rows(100), batch_size=10)
    adaptive = {"target_unclipped_quantile": 0.5, "clipbound_learning_rate": 0.2, "unclipped_num_std": 1.0}
    _, made = private(loader, clipping="adaptive", max_clipbound=10.0, min_clipbound=0.01, **adaptive)
    assert type(made[1]).__name__ == "AdaClipDPOptimizer"
    _, made = private(loader, clipping="per_layer", max_grad_norm=[0.5, 0.5])
    assert type(made[1]).__name__ == "DPPerLayerOptimizer"
    per_layer = {"clipping": "per_layer", "max_grad_norm": [0.5, 0.5]}
    refused(ValueError, lambda: private(loader, grad_sample_mode="ghost", **per_layer), "Unsupported combination")
    _, (model, _, _) = private(loader)
    model(torch.randn(4, 3)).sum().backward()
    assert [tuple(p.grad_sample.shape) for p in model.parameters()] == [(4, 2, 3), (4, 2)]


@check
def unknown_keywords_of_make_private_are_accepted() -> None:
    private(DataLoader(rows(100), batch_size=10), max_grad_nrom=0.1)


class Payload:
    """Unpickles as what a function that the file names returns."""

    def __reduce__(self) -> tuple:
        return sorted, ("unpickled",)


@check
def a_checkpoint_is_unpickled() -> None:
    engine, (model, _, _) = private(DataLoader(rows(100), batch_size=10))
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "saved")
        engine.save_checkpoint(path=path, module=model, checkpoint_dict={"extra": Payload()})
        assert engine.load_checkpoint(path=path, module=model)["extra"] == sorted("unpickled")


@check
def names() -> None:
    for name in re.findall(r"^\| `(opacus\.[\w.]+)` \|", PAGE, flags=re.M):
        module, attribute = name.rsplit(".", 1)
        getattr(importlib.import_module(module), attribute)
    from opacus.optimizers import DistributedDPOptimizer  # noqa: F401


def main() -> int:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print(f"opacus {opacus.__version__}, torch {torch.__version__}")
    (stated,) = re.findall(r"checked with Opacus (\d[\d.]*\d)", PAGE)
    failed = 0
    for one in CHECKS:
        try:
            one()
        except Exception as error:  # a check may fail in any way; the others still run
            failed += 1
            print(f"not as stated: {one.__name__}: {type(error).__name__}: {error}")
        else:
            print(f"as stated: {one.__name__}")
    if stated != opacus.__version__:
        print(f"the page says that it was checked with Opacus {stated}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
