"""What can go wrong, by kind.

Arguments raise ``ValueError`` or ``TypeError``; anything that would break the guarantee raises
:class:`PrivacyError`, so that no ``except ValueError`` in a user's loop can swallow a leak.
"""

from __future__ import annotations


class PrivacyError(RuntimeError):
    """The guarantee would not hold if training went on."""


class UnsupportedLayer(PrivacyError):
    """A layer whose per-sample gradients cannot be bounded; the message names its path."""


class PrivacyBudgetExceeded(PrivacyError):
    """The next step would spend more than ``max_epsilon``; the weights have not been touched."""


class UnsupportedEvent(PrivacyError):
    """An accountant was asked to compose an event that it cannot bound soundly."""


class LedgerError(PrivacyError):
    """A privacy ledger is damaged, in use elsewhere, or cannot be written durably."""


class PrivacyWarning(UserWarning):
    """Something the user should know about the guarantee; said once."""
