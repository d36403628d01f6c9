"""One kind of step of one row in PyTorch, for `step.py`: ``opacus_worker.py ROW plain|hooks|ghost``.

The optimizer is SGD and the noise multiplier 1, as on the Paddle side.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable

import torch
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping, DPPerLayerOptimizer
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn
from torch_workloads import ROWS, Row
from turns import resident_peak, take_turns


def stepper(row: Row, kind: str) -> Callable[[], None]:
    torch.manual_seed(0)
    model, inputs, labels = row.make(kind != "plain")
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, criterion = torch.optim.SGD(trained, lr=1e-3), nn.CrossEntropyLoss()
    private = {"noise_multiplier": 1.0, "expected_batch_size": row.batch}
    if kind == "hooks" and row.clipping == "per_layer":
        model = GradSampleModule(model)
        each = [len(trained) ** -0.5] * len(trained)
        optimizer = DPPerLayerOptimizer(optimizer, max_grad_norm=each, **private)
    elif kind == "hooks":
        model = GradSampleModule(model)
        optimizer = DPOptimizer(optimizer, max_grad_norm=1.0, **private)
    elif kind == "ghost":
        model = GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, use_ghost_clipping=True)
        optimizer = DPOptimizerFastGradientClipping(optimizer, max_grad_norm=1.0, **private)
        criterion = DPLossFastGradientClipping(model, optimizer, criterion)

    def step() -> None:
        criterion(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    imported = resident_peak()
    take_turns(stepper(ROWS[sys.argv[1]], sys.argv[2]), imported)
