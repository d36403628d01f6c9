"""A file a layer family; importing the package registers them all."""

from paddle_privacy.gradients.rules import convolution, elementwise, embedding, linear, normalization, peft, recurrent
from paddle_privacy.gradients.rules.registry import GradRule, find_rule, refusal, register_grad_rule

__all__ = [
    "GradRule",
    "convolution",
    "elementwise",
    "embedding",
    "find_rule",
    "linear",
    "normalization",
    "peft",
    "recurrent",
    "refusal",
    "register_grad_rule",
]
