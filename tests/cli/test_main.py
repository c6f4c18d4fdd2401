"""The frame of the command line: overview, statuses, one line an error."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Annotated

import pytest
import typer

from isoform import cli
from isoform.errors import DataError


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch):
    """Put a function in the place of the `show` command."""

    def put(function):
        module = types.ModuleType("isoform.cli.show")
        module.command = function
        monkeypatch.setitem(sys.modules, "isoform.cli.show", module)
        monkeypatch.setattr(cli, "commands", lambda: {"show": cli.GROUPS["Look"]["show"]})

    return put


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "isoform", *arguments],
        capture_output=True,
        env={**os.environ, **environment},
        check=False,
    )


def test_overview_lists_what_exists_without_loading_it():
    code = (
        "import sys; from isoform.cli import main; main(['--help']);"
        "bad = {'torch', 'typer', 'rich', 'pydantic'} & set(sys.modules);"
        "sys.exit(f'loaded {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name, entry in cli.commands().items():
        assert f"  {name:<9} {entry.help}" in done.stdout


def test_only_commands_with_a_file_are_listed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(cli.GROUPS["Look"], "look", cli.Entry("no_such_file", "nothing"))
    assert "look" not in cli.commands()
    assert "no_such_file" not in cli.overview()
    assert cli.main(["look"]) == 2


def test_every_listed_command_describes_itself(capsys: pytest.CaptureFixture[str]):
    for name in cli.commands():
        assert cli.main([name, "--help"]) == 0
        assert "Usage" in capsys.readouterr().out, name


def test_unknown_command_gets_the_nearest_name(command, capsys: pytest.CaptureFixture[str]):
    command(lambda: None)
    assert cli.main(["shwo"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "isoform: error: no command 'shwo'; did you mean 'show'?\n")
    assert cli.main(["--jsno"]) == 2
    assert "no option '--jsno'" in capsys.readouterr().err


def test_statuses(command, capsys: pytest.CaptureFixture[str]):
    for returned, status in ((None, 0), (0, 0), (1, 1)):
        command(lambda returned=returned: returned)
        assert cli.main(["show"]) == status

    def fails() -> None:
        raise DataError("corpus.tsv: line 3: no tab,\nexpected two columns")

    command(fails)
    assert cli.main(["show"]) == 2
    assert capsys.readouterr().err == "isoform: error: corpus.tsv: line 3: no tab, expected two columns\n"

    def interrupted() -> None:
        raise KeyboardInterrupt

    command(interrupted)
    assert cli.main(["show"]) == 130

    def exits() -> None:
        raise typer.Exit(1)

    command(exits)
    assert cli.main(["show"]) == 1

    def reads() -> None:
        Path("no/such/file").read_text()

    command(reads)
    capsys.readouterr()
    assert cli.main(["show"]) == 2
    assert capsys.readouterr().err == "isoform: error: no/such/file: No such file or directory\n"

    def broken() -> None:
        raise ZeroDivisionError("a bug")

    command(broken)
    assert cli.main(["show"]) == cli.CRASH
    assert "Traceback" in capsys.readouterr().err


def test_usage_errors_are_one_line(command, capsys: pytest.CaptureFixture[str]):
    def needs(count: Annotated[int, typer.Argument()]) -> None:
        """Count."""

    command(needs)
    for arguments in (["show"], ["show", "three"], ["show", "3", "--nope"]):
        assert cli.main(arguments) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        assert err.startswith("isoform: error: show: ") and "isoform show --help" in err


def test_no_argument_shows_the_overview_and_is_an_error(capsys: pytest.CaptureFixture[str]):
    assert cli.main([]) == 2
    assert "isoform COMMAND" in capsys.readouterr().out


def test_python_dash_m_under_an_ascii_locale():
    done = run("--help", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "…" in done.stdout.decode("utf-8")
    assert run("--version").stdout.startswith(b"isoform ")


def test_a_reader_that_leaves_is_no_error():
    code = (
        "import sys, types; from isoform import cli; module = types.ModuleType('isoform.cli.show');"
        "module.command = lambda: [print('line', i) for i in range(100_000)];"
        "sys.modules['isoform.cli.show'] = module;"
        "cli.commands = lambda: {'show': cli.Entry('show', '')}; sys.exit(cli.main(['show']))"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None and child.stderr is not None
    child.stdout.read(1)
    child.stdout.close()
    assert child.stderr.read() == b""
    child.stderr.close()
    assert child.wait() == cli.BROKEN_PIPE


def test_paragraphs_of_a_docstring_follow_the_readers_width(command, capsys: pytest.CaptureFixture[str]):
    def wrapped() -> None:
        """Head.

        One sentence in two
        lines of code.

        Another.
        """

    command(wrapped)
    assert cli.main(["show", "--help"]) == 0
    said = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "One sentence in two lines of code." in said and "Another." in said


def test_a_word_that_is_none_of_the_choices(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["init", "langauge-model"]) == 2
    said = capsys.readouterr().err
    assert "'langauge-model' is not one of 'translation'" in said and "Value error" not in said
