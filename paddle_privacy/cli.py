"""``paddle-privacy`` on the command line: a table of commands; each lives beside the code it calls."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

# command -> module that defines a function of that name; imported only when the command is asked for.
COMMANDS: dict[str, str] = {
    "epsilon": "paddle_privacy.accounting.commands",
    "noise": "paddle_privacy.accounting.commands",
    "plan": "paddle_privacy.accounting.commands",
    "verify": "paddle_privacy.cli_release",
    "report": "paddle_privacy.cli_release",
    "export": "paddle_privacy.cli_release",
    "audit": "paddle_privacy.cli_release",
    "selftest": "paddle_privacy.cli_release",
    "info": "paddle_privacy.info",
}


def build_app(names: Sequence[str] = tuple(COMMANDS)) -> Any:
    """A ``typer.Typer`` with the commands in ``names``; a command's help is its function's docstring."""
    try:
        import typer
    except ImportError as error:
        raise SystemExit(
            "The command line needs typer and rich; install them with: pip install 'paddle-privacy[cli]'"
        ) from error

    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        help="Differential privacy for PaddlePaddle: what a training run costs, and what it has spent.",
    )

    @app.callback()
    def _group() -> None:
        """Keeps the sub-command level when a single command is registered."""

    for name in names:
        function = getattr(import_module(COMMANDS[name]), name.replace("-", "_"))
        app.command(name)(function)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command; exits with status 2 and one sentence on bad arguments."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    names = given[:1] if given and given[0] in COMMANDS else tuple(COMMANDS)
    try:
        build_app(names)(args=given, prog_name="paddle-privacy")
    except (ValueError, TypeError) as error:
        print(f"paddle-privacy: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
