"""What can go wrong, by kind.

Arguments raise ``ValueError`` or ``TypeError``; anything that would break the guarantee raises
:class:`PrivacyError`, so that no ``except ValueError`` in a user's loop can swallow a leak.
"""

from __future__ import annotations


class PrivacyError(RuntimeError):
    """The guarantee would not hold if training went on."""


class UnsupportedLayer(PrivacyError):
    """A layer whose per-sample gradients cannot be bounded; the message names its path."""


class SamplesCoupled(UnsupportedLayer):
    """One sample's data was found to reach another sample's gradient.

    Unlike an argument that is refused, this is true of the steps already taken as well: the optimizer says how many
    there were, and the run's ledger records that its guarantee is void.
    """


class PrivacyBudgetExceeded(PrivacyError):
    """The next step would spend more than ``max_epsilon``; the weights have not been touched."""


class UnsupportedEvent(PrivacyError):
    """An accountant was asked to compose an event that it cannot bound soundly."""


class LedgerError(PrivacyError):
    """A privacy ledger is damaged, in use elsewhere, or cannot be written durably."""


class PrivacyWarning(UserWarning):
    """Something the user should know about the guarantee; said once."""
