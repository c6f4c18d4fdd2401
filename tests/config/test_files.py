"""Reading what people write, and writing whole files or nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from isoform.config import ModelConfig, presets, read, write
from isoform.config.files import read_table, write_bytes
from isoform.errors import ConfigError

CONFIG = presets.llama(50, d_model=8, n_heads=2, ffn_width=6, n_layers=1)


@pytest.mark.parametrize("culprit", ["replace", "fsync"])
def test_a_failed_write_leaves_the_old_file_and_no_other(culprit, tmp_path, monkeypatch):
    path = tmp_path / "config.toml"
    path.write_text("old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(*{"replace": (Path, "replace", fail), "fsync": (os, "fsync", fail)}[culprit])
    with pytest.raises(OSError, match="disk full"):
        write(CONFIG, path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["config.toml"]


def test_a_file_appears_only_when_it_is_whole(tmp_path, monkeypatch):
    path = tmp_path / "new" / "config.json"
    seen = []
    rename = Path.replace

    def spy(source, target):
        seen.append((Path(target).exists(), source.read_bytes(), source.parent == Path(target).parent))
        return rename(source, target)

    monkeypatch.setattr(Path, "replace", spy)
    write_bytes(path, b"whole")
    assert seen == [(False, b"whole", True)]
    assert path.read_bytes() == b"whole"


def test_permissions_are_those_of_any_new_file(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    write_bytes(tmp_path / "ours", b"")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.toml", b"d_model = ", "a.toml: not valid TOML: "),
        ("a.yaml", b"a: [1", "a.yaml: not valid YAML: "),
        ("a.json", b"{", "a.json: not valid JSON: "),
        ("a.json", b"[]", "a.json: expected a table of settings, found list"),
        ("a.yaml", b"", "a.yaml: expected a table of settings, found NoneType"),
        ("a.toml", b"# caf\xe9", "a.toml: not UTF-8 at byte 5"),
        (
            "a.ini",
            b"",
            "a.ini: unknown kind of configuration file; expected one of .toml, .yaml, .yml, .json",
        ),
        ("a.json", b'{"a": 1, "a": 2}', "a.json: not valid JSON: key 'a' is written twice"),
        ("a.yaml", b"b:\n  a: 1\n  a: 2\n", "a.yaml: not valid YAML: key 'a' is written twice"),
    ],
)
def test_unreadable_files_are_one_clear_line(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read_table(tmp_path / name)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        read_table(tmp_path / "a.toml")
    (tmp_path / "b.toml").mkdir()
    with pytest.raises(ConfigError, match="a folder, expected a configuration file"):
        read_table(tmp_path / "b.toml")


def test_faults_carry_the_name_of_the_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("d_model: 8\nhead: none\n")
    with pytest.raises(ConfigError) as error:
        read(ModelConfig, path)
    assert str(error.value) == f"{path}: embedding: required, and never implied"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1.5", 1.5),
        ("12", 12),
        ("-3", -3),
        ("no", "no"),
        ("true", True),
        ("~", None),
        ("0x1F", 31),
    ],
)
def test_yaml_scalars_are_those_of_version_1_2(text, value, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(f"key: {text}\n")
    assert read_table(path) == {"key": value}
    assert type(read_table(path)["key"]) is type(value)
