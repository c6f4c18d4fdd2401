"""Writes docs/configuration.md: every field of a configuration, its type, default and meaning.

The page is made from the classes themselves, so that it cannot say anything else than the code:
``python docs/generate_reference.py`` after a change, ``--check`` to see whether one is due.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Lt
from pydantic import BaseModel, WithJsonSchema
from pydantic.fields import FieldInfo

from isoform.config import ModelConfig, describe, difference_in_words, dumps, presets
from isoform.config.files import write_text
from isoform.config.protocol import Protocol
from isoform.training.config import RunConfig

PAGE = Path(__file__).with_name("configuration.md")
SECTIONS: tuple[tuple[str, type[BaseModel]], ...] = (
    ("Architecture", ModelConfig),
    ("Token protocol", Protocol),
    ("Run file", RunConfig),
)

INTRODUCTION = """\
# Configuration

<!-- Made by docs/generate_reference.py from the classes themselves. Do not edit. -->

An architecture is one frozen value, `isoform.config.ModelConfig`, written as TOML, YAML or JSON. Whatever
chooses between two functions of the same shape has to be written; a default is always the absence of an
operation. An unknown key, a wrong type or a contradiction is refused with one line that says where.

- Where a table can be one of several kinds, its key `kind` says which one.
- "or none" marks what may be absent. TOML has no null: where such a field must be written, write `"none"`.
- `config.replace(decoder__layer__placement="pre")` gives a changed copy; nothing else changes (R15, R17).
- `isoform.config.schema(ModelConfig)` is the JSON schema, for editors.
"""


def main() -> None:
    """Write the page, or compare it."""
    text = render()
    if "--check" in sys.argv[1:]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
            sys.exit(f"{PAGE} is out of date: run python docs/generate_reference.py")
        return
    write_text(PAGE, text)


def render() -> str:
    """The whole page."""
    lines = [INTRODUCTION, *_presets(), *_example()]
    seen: set[type[BaseModel]] = set()
    for title, root in SECTIONS:
        lines += [f"## {title}\n"]
        for kind in _reachable(root):
            if kind not in seen:
                seen.add(kind)
                lines += _table(kind)
    return "\n".join(lines)


def _presets() -> Iterator[str]:
    yield "## Presets\n"
    yield "`isoform.presets.NAME(…)` returns an ordinary configuration.\n"
    yield "| preset | what it is |\n|---|---|"
    for name, function in presets.PRESETS.items():
        yield f"| `{name}` | {_cell((inspect.getdoc(function) or '').splitlines()[0])} |"
    yield ""


def _example() -> Iterator[str]:
    config = presets.gpt2(vocab_size=8000)
    yield "`gpt2(vocab_size=8000)` as a file, and in the words of `isoform show`:\n"
    yield f"```toml\n{dumps(config).strip()}\n```\n"
    yield "```\n" + "\n".join(describe(config)) + "\n```\n"
    yield "What separates `original(8000)` from `pre_ln(8000)`:\n"
    changed = difference_in_words(presets.original(8000), presets.pre_ln(8000))
    yield "```\n" + "\n".join(changed) + "\n```\n"


def _reachable(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """A class and those its fields hold, outermost first."""
    found, queue = [kind], [kind]
    while queue:
        for field in queue.pop(0).model_fields.values():
            for inner in _models(field.annotation):
                if inner not in found:
                    found.append(inner)
                    queue.append(inner)
    return iter(found)


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def _table(kind: type[BaseModel]) -> Iterator[str]:
    yield f"### {kind.__name__}\n"
    text, described = _docstring(kind)
    yield f"{text}\n"
    rows = [(name, field) for name, field in kind.model_fields.items()]
    yield "| field | type | default | meaning |\n|---|---|---|---|"
    for name, field in rows:
        if name == "kind" and not field.is_required():
            meaning, default = "Says that the table is of this kind.", "required where it can be another"
        else:
            meaning, default = field.description or described.get(name, ""), _default(field)
        yield f"| `{name}` | {_type(field)} | {default} | {_cell(meaning)} |"
    yield ""


def _docstring(kind: type[BaseModel]) -> tuple[str, dict[str, str]]:
    """The text of a docstring without its fields, and what it and those of the classes above say of each."""
    described: dict[str, str] = {}
    for above in reversed(kind.__mro__):
        if issubclass(above, BaseModel) and above.__doc__:
            described |= _parts(above)[1]
    return _parts(kind)[0], described


def _parts(kind: type[BaseModel]) -> tuple[str, dict[str, str]]:
    text, *rest = re.split(r"\n(?:Args|Attributes):\n", inspect.cleandoc(kind.__doc__ or ""), maxsplit=1)
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", rest[0] if rest else "", flags=re.MULTILINE)
    return text.strip().replace("``", "`"), dict(found)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if isinstance(value, BaseModel):
        return f"`{type(value).__name__}`"
    if isinstance(value, tuple):
        return "empty" if not value else f"`{list(value)}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _type(field: FieldInfo) -> str:
    return " or ".join(dict.fromkeys(_names(field.annotation, field.metadata)))


def _names(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> list[str]:
    """A type in words, one entry a member of a union."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _names(args[0], args[1:])
    if origin in (Union, types.UnionType):
        return [name for part in sorted(args, key=lambda part: part is type(None)) for name in _names(part)]
    if origin is Literal:
        return [f"`{value}`" for value in args]
    if origin is tuple:
        inner = args[0] if args[-1] is ... else Any
        return [f"list of {' or '.join(_names(inner))}"] if inner is not Any else ["pair"]
    if annotation is type(None):
        return ["none"]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [f"[{annotation.__name__}](#{annotation.__name__.lower()})"]
    if enum := [value for item in metadata if isinstance(item, WithJsonSchema) for value in _enum(item)]:
        return [f"`{value}`" for value in enum]
    if origin is dict:
        return ["table"]
    words = {bool: "true or false", int: "integer", float: "number", str: "text", Path: "path"}
    return [words.get(annotation, str(annotation)) + _bounds(metadata)]


def _enum(item: WithJsonSchema) -> list[Any]:
    return (item.json_schema or {}).get("enum", [])


def _bounds(metadata: list[Any] | tuple[Any, ...]) -> str:
    """The limits among a field's annotations: " ≥ 0 and < 1"."""
    limits: list[str] = []
    for item in (inner for m in metadata for inner in (m.metadata if isinstance(m, FieldInfo) else [m])):
        if isinstance(item, Gt):
            limits.append(f"> {item.gt}")
        elif isinstance(item, Ge):
            limits.append(f"≥ {item.ge}")
        elif isinstance(item, Lt):
            limits.append(f"< {item.lt}")
    return " " + " and ".join(limits) if limits else ""


if __name__ == "__main__":
    main()
