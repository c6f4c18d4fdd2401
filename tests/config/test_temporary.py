"""Names that things have until they are whole: what killed writers leave goes, what is in use stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from isoform.config.files import write_bytes
from isoform.config.folders import replaced
from isoform.config.temporary import sweep, temporary

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="nothing is known of writers there")

WRITER = """
import sys
from pathlib import Path
from isoform.config.temporary import temporary
with temporary(Path(sys.argv[1]), folder=bool(sys.argv[2])) as new:
    print(new, flush=True)
    sys.stdin.read()
"""


def begun(path: Path, folder: bool) -> tuple[subprocess.Popen[str], Path]:
    """A process that is writing, and where."""
    command = [sys.executable, "-c", WRITER, str(path), "1" if folder else ""]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    return writer, Path(writer.stdout.readline().strip())


def killed(writer: subprocess.Popen[str]) -> None:
    writer.kill()
    writer.communicate()


def test_what_cannot_be_written_is_told_by_its_own_name(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 250)  # its temporary name is too long for the file system
    with pytest.raises(OSError) as caught:
        write_bytes(path, b"")
    assert caught.value.filename == str(path)


@pytest.mark.parametrize("folder", [False, True])
def test_only_what_nobody_writes_any_more_is_removed(tmp_path: Path, folder: bool) -> None:
    writer, left = begun(tmp_path / "x", folder)
    try:
        assert left.is_dir() == folder and left.exists()
        sweep(tmp_path, "x")
        assert left.exists()
    finally:
        killed(writer)
    assert left.exists()
    other = tmp_path / ".y.0123abcd.tmp"
    other.write_bytes(b"")
    if folder:
        (left / "half").write_bytes(b"1")
        with replaced(tmp_path / "x", mark="mark") as new:
            assert not left.exists()
            (new / "mark").write_bytes(b"")
    else:
        write_bytes(tmp_path / "x", b"whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".y.0123abcd.tmp", "x"]


def test_the_only_copy_that_was_put_aside_stays(tmp_path: Path) -> None:
    aside = tmp_path / ".x.0123abcd.old"
    aside.mkdir()
    sweep(tmp_path, "x")
    assert aside.exists()
    (tmp_path / "x").mkdir()
    sweep(tmp_path, "x")
    assert not aside.exists()


@pytest.mark.parametrize("name", [".x.mine.tmp", "x.0123abcd.tmp", ".x.0123abcd", ".x.0123abcd.tmp.txt"])
def test_files_of_others_stay(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with temporary(tmp_path / "x"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [name]
