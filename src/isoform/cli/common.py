"""What commands share: the ``--json`` option, remarks, and what a TARGET may be."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isoform.config.files import SUFFIXES, read_table
from isoform.errors import ConfigError, DataError, IsoformError, did_you_mean

if TYPE_CHECKING:
    from torch import nn

    from isoform.checkpoints import Bundle
    from isoform.config import ModelConfig

Json = Annotated[bool, typer.Option("--json", help="Plain JSON on stdout, and nothing else there.")]
TargetName = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="An artifact, a checkpoint directory of a known family, a configuration file, "
        "file.py:factory or package.module:factory.",
        show_default=False,
    ),
]


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """What a TARGET turned out to be.

    Args:
        name: as the user wrote it.
        config: the architecture; None for a module that is not ours.
        model: the network, where there is one; a configuration has none.
        bundle: the artifact or checkpoint, with tokenizer and protocol.
    """

    name: str
    config: ModelConfig | None = None
    model: nn.Module | None = None
    bundle: Bundle | None = None

    def architecture(self) -> ModelConfig:
        """The configuration.

        Raises:
            ConfigError: a module that is not an Isoform network has none.
        """
        if self.config is None:
            raise ConfigError(
                f"{self.name}: a {type(self.model).__name__}, which has no Isoform configuration; "
                "expected an artifact, a checkpoint, a configuration file or a factory of either"
            )
        return self.config


def resolve(name: str) -> Target:
    """Find out what a TARGET is and open it.

    Raises:
        ConfigError: no such thing, or a configuration that is not valid.
        ArtifactError: a directory that is neither an artifact nor a checkpoint of a known family.
    """
    path = Path(name)
    if path.is_file() and path.suffix in SUFFIXES:
        return Target(name, read_config(path))
    if path.is_dir() or (path.is_file() and path.suffix != ".py"):
        from isoform.checkpoints import load

        bundle = load(path)
        return Target(name, bundle.config, bundle.model, bundle)
    if path.is_file():
        raise ConfigError(f"{name}: a Python file; expected {name}:factory, a function in it")
    if ":" in name:
        return _made(name, called(name, load_factory(name)))
    if path.suffix:
        raise ConfigError(f"{name}: no such file")
    raise ConfigError(
        f"{name}: no such file or directory; expected an artifact, a checkpoint directory, "
        "a configuration file, file.py:factory or package.module:factory"
    )


def read_config(path: Path) -> ModelConfig:
    """The architecture in a configuration file: a model of its own, or the [model] table of a run."""
    from isoform.config import ModelConfig, parse

    table = read_table(path)
    if "model" in table and "d_model" not in table:
        from isoform.training.config import read_run

        return read_run(path).architecture()
    return parse(ModelConfig, table, where=str(path))


def load_factory(name: str) -> Any:
    """The callable behind ``file.py:factory`` or ``package.module:factory``.

    Raises:
        ConfigError: no such module or name, or it cannot be called.
    """
    module_name, _, attribute = name.rpartition(":")
    module = _module(module_name, name)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [n for n in vars(found) if not n.startswith("_")] if hasattr(found, "__dict__") else []
            raise ConfigError(f"{name}: {module_name} has no {part!r}{did_you_mean(part, public)}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{name}: {attribute} is a {type(found).__name__}, expected a function that builds")
    return found


def refuse_idle(context: typer.Context, names: Collection[str], why: str) -> None:
    """Refuse options that were written on the command line but would change nothing.

    Raises:
        ConfigError: one of ``names`` (of the command's parameters) was given.
    """
    for parameter in context.command.params:
        if parameter.name in names:
            source = context.get_parameter_source(parameter.name)
            if source is not None and source.name == "COMMANDLINE":
                raise ConfigError(f"{parameter.opts[0]} {why}")


def called(name: str, factory: Callable[[], Any]) -> Any:
    """What the user's function gives.

    Raises:
        ConfigError: it fails, or cannot be called without arguments.
    """
    import inspect

    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise ConfigError(f"{name}: {error}; expected a function that needs no arguments") from None
    except ValueError:  # a builtin without a signature
        pass
    try:
        return factory()
    except IsoformError:
        raise
    except Exception as error:
        raise ConfigError(f"{name} failed with {_raised(error)}") from error


def emit(payload: Any) -> None:
    """Write an object to stdout as JSON: dataclasses as tables, tensors as lists, NaN and ∞ as null."""
    sys.stdout.write(json.dumps(plain(payload), ensure_ascii=False, indent=2) + "\n")


def speaks() -> bool:
    """Whether this process is the one that reports: of those of torchrun the first does."""
    return os.environ.get("RANK", "0") == "0"


def remark(text: str) -> None:
    """Say something that is not the result, on stderr."""
    print(text, file=sys.stderr)


def stdin_lines() -> list[str]:
    """The lines of stdin without their ends.

    Raises:
        DataError: not UTF-8.
    """
    try:
        return sys.stdin.read().splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"stdin: not UTF-8 at byte {error.start}") from None


def plain(value: Any) -> Any:
    """The value as JSON can say it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "model_dump"):
        return plain(value.model_dump())
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _module(module_name: str, name: str) -> ModuleType:
    here = str(Path.cwd())
    if not module_name.endswith(".py"):
        if here not in sys.path:
            sys.path.insert(0, here)
        try:
            return importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and module_name.startswith(error.name):
                raise ConfigError(f"{name}: no module named {error.name!r}") from None
            raise ConfigError(f"{name}: importing {module_name} failed: {error}") from None
        except ValueError:
            raise ConfigError(f"{name}: {module_name!r} is not a module name") from None
    path = Path(module_name).resolve()
    if not path.is_file():
        raise ConfigError(f"{name}: {module_name}: no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # The file may import its neighbours, and its classes must find their module (dataclasses, pickles).
    sys.modules.setdefault(path.stem, module)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (ImportError, SyntaxError) as error:
        raise ConfigError(f"{name}: {module_name} cannot be loaded: {error}") from None
    except IsoformError:
        raise
    except Exception as error:
        raise ConfigError(f"{name}: {module_name} cannot be loaded: {_raised(error)}") from error
    return module


def _raised(error: Exception) -> str:
    """An error of the user's code, and the line of it, or of what it called, where it was raised."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    own = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith("<")]
    where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{where}"


def _made(name: str, built: Any) -> Target:
    from isoform.config import ModelConfig

    if isinstance(built, ModelConfig):  # before PyTorch is imported: its closed forms need none
        return Target(name, built)
    from torch import nn

    from isoform.nn import Transformer

    if isinstance(built, Transformer):
        return Target(name, built.config, built)
    if isinstance(built, nn.Module):
        return Target(name, None, built)
    from isoform.checkpoints import Bundle

    if isinstance(built, Bundle):
        return Target(name, built.config, built.model, built)
    raise ConfigError(
        f"{name} returned {type(built).__name__}, expected a torch.nn.Module, a ModelConfig or a Bundle"
    )
