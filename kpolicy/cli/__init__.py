"""The `kpolicy` command: run, simulate, sweep, report, plan, decide and the others. docs/cli.md describes each.

What can't be done because of what was asked is one line on standard error and exit code 2.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cyclopts import App, CycloptsError
from cyclopts.exceptions import CoercionError, MissingArgumentError, UnknownOptionError, UnusedCliTokensError

from kpolicy import __version__
from kpolicy.cli.calibrate import calibrate_command
from kpolicy.cli.decide import decide, explain
from kpolicy.cli.generate import generate
from kpolicy.cli.lists import doctor, policies
from kpolicy.cli.options import COMMAND
from kpolicy.cli.plan import plan
from kpolicy.cli.recorded import explain_log
from kpolicy.cli.render import drop_output
from kpolicy.cli.report import report_command
from kpolicy.cli.run import run
from kpolicy.cli.simulate import simulate_command
from kpolicy.cli.sweep import sweep_command
from kpolicy.errors import KPolicyError, StickyDeviceError

__all__ = ["app", "main"]

app = App(
    name="kpolicy",
    help="Decides, batch by batch, how a captured-graph LLM step runs, and says why.",
    version=__version__,
    suppress_keyboard_interrupt=False,
)
app.command(run)
app.command(simulate_command, name="simulate")
app.command(sweep_command, name="sweep")
app.command(report_command, name="report")
app.command(generate)
app.command(calibrate_command, name="calibrate")
app.command(plan)
app.command(decide)
app.command(explain)
app.command(explain_log)
app.command(explain_log, name="vllm-explain", show=False)
app.command(policies)
app.command(doctor)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command's entry point. It always exits, with one of these codes.

    - 0: done.
    - 1: outputs were wrong, the device was lost, a simulation served nothing, or a part can't be done or written.
    - 2: what was asked can't be done.
    - 130: interrupted.
    """
    _have_streams()
    given = sys.argv[1:] if arguments is None else list(arguments)
    COMMAND.set(tuple(given))
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _told(warnings.showwarning)
            code = app(given, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
    except CycloptsError as error:
        _fail(_usage(error), 2)
    except StickyDeviceError as error:
        _fail(str(error), 1)
    except KPolicyError as error:
        _fail(str(error), 2)
    except BrokenPipeError:
        # Who read our output has enough of it.
        drop_output()
        sys.exit(0)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            # Options are looked at before anything runs, so this comes before the work.
            _fail(_too_long(error, given), 2)
        drop_output()
        _fail(f"{error}. Is there space where the output goes?", 1)
    except KeyboardInterrupt:
        _fail("interrupted.", 130)
    sys.exit(code if isinstance(code, int) else 0)


_LAST_STREAM = 2
"""The number of standard error"""
_TAKE_TRACES = ("simulate", "sweep", "plan", "report")
"""Commands that read traces, whose first argument is one"""


def _usage(error: CycloptsError) -> str:
    """The error of a command line that can't be read, and where to look."""
    chain = tuple(error.command_chain or ())
    command = " ".join(("kpolicy", *chain))
    if isinstance(error, UnusedCliTokensError):
        left = ", ".join(map(repr, error.unused_tokens or ()))
        return f"{command} doesn't take {left}; any further value follows its option. See {command} --help."
    traced = isinstance(error, UnknownOptionError) and "--trace" in (error.token.keyword, error.token.value)
    if traced and chain and chain[0] in _TAKE_TRACES:
        # It is an option of `run` alone, which has one trace.
        return f"{command} takes its traces without an option, such as {command} conv.csv. See {command} --help."
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        option = error.argument.name
        lacks = f"{option} has no value" if error.keyword else f"{command} needs {option}"
        takes = error.argument.parameter.help or "a value"
        return f"{lacks}: {takes.rstrip('.')}. See {command} --help."
    if isinstance(error, CoercionError) and error.token is not None:
        token, takes = error.token, _TAKEN["whole number" if "whole number" in str(error) else error.target_type]
        if takes:
            return f"{token.keyword or 'a value'} is {token.value[:40]!r}; it takes {takes}. See {command} --help."
    return f"{str(error).strip() or type(error).__name__} See {command} --help."


def _too_long(error: OSError, given: Sequence[str]) -> str:
    """The error of a file's name that no folder takes, by the option that gave it, be a policy's name added or not."""
    asked = Path(os.fsdecode(error.filename or ""))
    # The longest first: a short value may be how another one begins.
    for option, value in sorted(_options(given), key=lambda each: -len(each[1])):
        path = Path(value)
        if path.name and asked.parent == path.parent and asked.name.startswith(path.stem):
            several = "" if asked == path else f", as {asked.name}"
            return f"{option} {value}: the name is too long{several}. Give a shorter one."
    return f"{asked}: the name is too long. Give a shorter one."


def _options(given: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Options of a command line with their values, be they apart or joined by ``=``."""
    for word, after in zip(given, (*given[1:], ""), strict=True):
        option, joined, value = word.partition("=")
        if option.startswith("--"):
            yield option, value if joined else after


_NUMBER = "a number, such as 1.5"
_TAKEN: Mapping[Any, str] = defaultdict(
    str, {"whole number": "a whole number, such as 8", float: _NUMBER, float | None: _NUMBER}
)
"""What options of these types take"""


_OURS = str(Path(__file__).resolve().parents[1])


def _told(show: Callable[..., Any]) -> Callable[..., Any]:
    """Shows our own warnings as a line of the command's, and others as they would be."""

    def tell(message: Warning | str, category: type[Warning], filename: str, *more: Any, **named: Any) -> None:
        if filename.startswith(_OURS):
            sys.stderr.write(f"kpolicy: {message}\n")
        else:
            show(message, category, filename, *more, **named)

    return tell


def _have_streams() -> None:
    """Drop what goes to standard output or error where that is closed; no file opened later is to take its number."""
    if sys.stdout is not None and sys.stderr is not None:
        return
    while (spare := os.open(os.devnull, os.O_RDWR)) <= _LAST_STREAM:
        pass
    os.close(spare)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8")


def _fail(message: str, code: int) -> None:
    sys.stderr.write(f"kpolicy: {message}\n")
    sys.exit(code)
