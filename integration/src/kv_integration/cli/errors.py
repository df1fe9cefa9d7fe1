"""How a command ends when something is wrong: one line on stderr, no traceback."""

from __future__ import annotations

import sys
from typing import Any

import click

BAD_INPUT = 2
INTERRUPTED = 130


class Commands(click.Group):
    """A group whose commands report wrong input in one line and exit with code 2.

    Commands raise ValueError or OSError for wrong input; any other exception is a bug of ours and
    keeps its traceback. Ctrl-C exits with code 130.
    """

    def main(self, *args: Any, **extra: Any) -> Any:
        try:
            result = super().main(*args, **{**extra, "standalone_mode": False})
        except click.ClickException as error:
            _leave(error.format_message(), BAD_INPUT)
        except (ValueError, OSError) as error:
            _leave(str(error), BAD_INPUT)
        except (click.Abort, KeyboardInterrupt):
            _leave("interrupted", INTERRUPTED)
        sys.exit(result if isinstance(result, int) else 0)


def _leave(message: str, code: int) -> None:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(code)
