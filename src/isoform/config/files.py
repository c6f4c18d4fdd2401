"""Configurations in and out of TOML, YAML and JSON, and their JSON schema."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, TypeVar

from isoform.config.base import Frozen, parse
from isoform.config.temporary import temporary
from isoform.errors import ConfigError

C = TypeVar("C", bound=Frozen)
SUFFIXES = (".toml", ".yaml", ".yml", ".json")


def read_table(path: str | Path) -> dict[str, Any]:
    """Read a TOML, YAML or JSON file into plain nested dicts.

    Raises:
        ConfigError: no such file, not UTF-8, not the syntax its suffix promises, or not a table.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            f"{path}: unknown kind of configuration file; expected one of {', '.join(SUFFIXES)}"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: a folder, expected a configuration file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    try:
        data = _loads(text, path.suffix)
    except Exception as error:  # each library has its own exception; all mean: this is not the syntax
        raise ConfigError(
            f"{path}: not valid {path.suffix[1:].upper()}: {' '.join(str(error).split())}"
        ) from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a table of settings, found {type(data).__name__}")
    return data


def read(kind: type[C], path: str | Path) -> C:
    """Read and validate a configuration file."""
    return parse(kind, read_table(path), where=str(path))


def dumps(config: Frozen, suffix: str = ".toml") -> str:
    """The configuration as text. Fields that are absent and need not be written are left out."""
    data = _plain(config)
    if suffix == ".json":
        return json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    if suffix in (".yaml", ".yml"):
        import yaml

        return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    if suffix == ".toml":
        import tomli_w

        return tomli_w.dumps(data)
    raise ConfigError(f"cannot write {suffix!r}; expected one of {', '.join(SUFFIXES)}")


def write(config: Frozen, path: str | Path) -> None:
    """Write the configuration whole or not at all, in the syntax of the path's suffix."""
    write_text(path, dumps(config, Path(path).suffix))


def schema(kind: type[Frozen]) -> dict[str, Any]:
    """The JSON schema of a configuration class."""
    return kind.model_json_schema()


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 file under a temporary name, flush it to disk, then rename it into place."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write a file under a temporary name, flush it to disk, then rename it into place."""
    path = Path(path)
    with temporary(path) as new:
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)


def _loads(text: str, suffix: str) -> Any:
    if suffix == ".json":
        return json.loads(text, object_pairs_hook=_unique)
    if suffix == ".toml":
        return _load_toml(text)
    from isoform.config.yaml12 import load

    return load(text)


def _load_toml(text: str) -> Any:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # pyright: ignore[reportMissingImports]
    return tomllib.loads(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"key {key!r} is written twice")
    return dict(pairs)


def _plain(config: Frozen) -> dict[str, Any]:
    """Nested dicts without nulls: absent fields are left out; those with a default say "none"."""
    result: dict[str, Any] = {}
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if value is None:
            if field.is_required() or field.get_default() is not None:
                result[name] = "none"
            continue
        if not field.is_required() and name != "kind" and value == field.get_default():
            continue
        result[name] = _value(value)
    return result


def _value(value: Any) -> Any:
    if isinstance(value, Frozen):
        return _plain(value)
    if isinstance(value, tuple | list):
        return [_value(item) for item in value]
    if isinstance(value, dict):
        return {key: _value(item) for key, item in value.items()}
    if isinstance(value, Path):
        return str(value)
    return value
