"""The command line: ``isoform COMMAND …``, one file a command, loaded when it is called.

A command's file holds one function, ``command``, annotated for typer; its docstring is its help, and what it
returns is the exit status (None: 0). Statuses: 0 done, and what was checked holds; 1 it does not hold; 2 bad
input, with one line on stderr that says what and where; 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import threading
from collections.abc import Generator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import typer


class Entry(NamedTuple):
    """A line of the command table: the module under ``isoform.cli`` and what the overview says of it."""

    module: str
    help: str


GROUPS: dict[str, dict[str, Entry]] = {
    "Train": {
        "demo": Entry("demo", "train, evaluate and prove a model on the built-in dates"),
        "init": Entry("init", "write a starter configuration"),
        "check": Entry("check", "preflight of a run, or re-check of an artifact"),
        "train": Entry("train", "train; the same command resumes"),
        "ablate": Entry("ablate", "compare runs that differ in one setting each"),
    },
    "Use": {
        "generate": Entry("generate", "text in, text out"),
        "evaluate": Entry("evaluate", "metrics with their signatures on a test set"),
        "import": Entry("import_", "a checkpoint of a known family into an artifact"),
        "export": Entry("export", "an artifact into another format"),
        "optimize": Entry("optimize", "narrow weights for inference, the loss of quality measured"),
    },
    "Look": {
        "show": Entry("show", "architecture in words, visibility, shapes, parameters"),
        "cost": Entry("cost", "parameters, FLOPs and memory in closed form"),
        "trace": Entry("trace", "a forward pass step by step"),
    },
    "Prove": {
        "audit": Entry("audit", "does one model keep its promises: causality, padding, cache …"),
        "compare": Entry("compare", "where two models first part"),
        "diagnose": Entry("diagnose", "why two models part, by name"),
    },
}

OK, FAILS, BAD_INPUT, CRASH, INTERRUPTED, BROKEN_PIPE, TERMINATED = 0, 1, 2, 70, 130, 141, 143


class Terminated(BaseException):
    """SIGTERM, as an exception: what was begun is tidied up on the way out."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status. Every deliberate error is one line on stderr."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    _speak_utf8()
    try:
        with _tidy():
            status = _dispatch(arguments)
            sys.stdout.flush()
        return status
    except BrokenPipeError:
        _silence_stdout()
        return BROKEN_PIPE
    except Terminated:
        return _complain("terminated", TERMINATED)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        return _complain(f"{where}{error.strerror or error}", BAD_INPUT)
    except Exception as error:
        from isoform.errors import IsoformError

        if isinstance(error, IsoformError):
            return _complain(str(error), BAD_INPUT)
        import traceback

        traceback.print_exc()
        return CRASH


def commands() -> dict[str, Entry]:
    """The commands there are, by name."""
    here = Path(__file__).parent
    return {
        name: entry
        for group in GROUPS.values()
        for name, entry in group.items()
        if (here / f"{entry.module}.py").exists()
    }


def application(name: str) -> typer.Typer:
    """One command as a typer application, e.g. for ``typer.testing.CliRunner``."""
    import importlib

    import typer

    module = importlib.import_module(f"isoform.cli.{commands()[name].module}")
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    settings = {"help_option_names": ["-h", "--help"]}
    app.command(name, help=_flowing(module.command.__doc__ or ""), context_settings=settings)(module.command)
    return app


def overview() -> str:
    """The help page of ``isoform`` itself, made without loading any command."""
    known = commands()
    lines = ["Build, train, port and prove Transformer networks.", "", "isoform COMMAND …", ""]
    for title, group in GROUPS.items():
        entries = {name: entry for name, entry in group.items() if name in known}
        if entries:
            lines += [title, *(f"  {name:<9} {entry.help}" for name, entry in entries.items()), ""]
    lines += [
        "isoform COMMAND --help says more; isoform --version prints the version.",
        "Exit status: 0 done, what was checked holds; 1 it does not hold; 2 bad input.",
    ]
    return "\n".join(lines)


def _dispatch(arguments: list[str]) -> int:
    first = arguments[0] if arguments else "--help"
    if first in ("--help", "-h"):
        print(overview())
        return OK if arguments else BAD_INPUT
    if first == "--version":
        import isoform

        print(f"isoform {isoform.__version__}")
        return OK
    if first not in commands():
        from isoform.errors import did_you_mean

        kind = "option" if first.startswith("-") else "command"
        hint = "; see isoform --help" if kind == "option" else did_you_mean(first, commands())
        return _complain(f"no {kind} {first!r}{hint}", BAD_INPUT)
    return _invoke(first, arguments[1:])


def _invoke(name: str, arguments: list[str]) -> int:
    import typer

    # Some versions of typer carry click inside them: its error class is reached through a public subclass.
    usage: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
    try:
        command = typer.main.get_command(application(name))
        status = command.main(arguments, prog_name=f"isoform {name}", standalone_mode=False)
    except usage as error:
        line = " ".join(error.format_message().split()).rstrip(".").replace("Value error, ", "")
        return _complain(f"{name}: {line} (see isoform {name} --help)", BAD_INPUT)
    except typer.Abort:
        return _complain("interrupted", INTERRUPTED)
    except SystemExit:  # click's own reaction to a broken pipe, and nobody else's
        _silence_stdout()
        return BROKEN_PIPE
    return status if isinstance(status, int) else OK


@contextlib.contextmanager
def _tidy() -> Generator[None]:
    """Raise `Terminated` at SIGTERM, unless whoever called has a handler of their own."""
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _complain(message: str, status: int) -> int:
    line = " ".join(message.split())
    print(f"isoform: error: {line}" if status == BAD_INPUT else line, file=sys.stderr)
    return status


def _flowing(docstring: str) -> str:
    """A docstring whose paragraphs are lines, for whatever width the reader has."""
    import inspect

    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(docstring).split("\n\n"))


def _speak_utf8() -> None:
    """UTF-8 whatever the locale says. Input must be it; file names that are not pass through unharmed."""
    for stream, errors in (
        (sys.stdin, "strict"),
        (sys.stdout, "surrogateescape"),
        (sys.stderr, "backslashreplace"),
    ):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=errors)


def _silence_stdout() -> None:
    """Keep the interpreter's last flush from complaining about a reader that has gone."""
    import os

    with contextlib.suppress(OSError, ValueError):  # not a real file: a test's buffer
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
