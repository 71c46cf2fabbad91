"""The entry point `excite`: global options, error messages, exit status."""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated, NoReturn

import typer

from excite._core.compatibility import present_options
from excite._version import __version__
from excite.errors import ExciteError

# Each module adds its command to `app`; `excite --help` lists them in this order.
# isort: off
from excite.cli.shared import app, console
from excite.cli.commands import demo, study, train, sweep, margins, audit, trace, report, serve, repair, doctor, data  # noqa: F401
# isort: on

__all__ = ["app", "console", "main"]

_INTERRUPTED = 130
_debug = False


def main() -> None:
    """Runs the command line; errors that a user can cause end in one line and a non-zero exit status."""
    try:
        status = app(present_options(sys.argv[1:]), standalone_mode=False) or 0
        if status == _INTERRUPTED:  # how typer reports Ctrl-C depends on its version
            raise KeyboardInterrupt
        raise SystemExit(status)
    except (KeyboardInterrupt, typer.Abort):
        if os.environ.get("RANK", "0") != "0":  # of several processes only the first one prints it
            raise SystemExit(_INTERRUPTED) from None
        _fail("stopped; the same command continues where it was", _INTERRUPTED)
    except ExciteError as error:
        if type(error).__name__ == "OtherProcess":  # the process that failed prints the reason
            # torchrun ends all processes as soon as one has ended: wait until the other one has printed its line.
            time.sleep(5)
            raise SystemExit(1) from None
        _fail(str(error), 1, error)
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # wrong usage: typer prints it
            error.show()
            raise SystemExit(error.exit_code) from None
        _fail(f"unexpected {type(error).__name__}: {error} (`excite --debug …` shows the traceback)", 1, error)


def _fail(message: str, status: int, error: Exception | None = None) -> NoReturn:
    if _debug and error is not None:
        raise error
    print(f"excite: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(status)


def _print_version(value: bool) -> None:
    if value:
        print(__version__)
        raise typer.Exit()


@app.callback()
def _global_options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    global _debug
    _debug = debug


if __name__ == "__main__":
    main()
