"""The special tokens of a checkpoint folder by name, as its files give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from isoform.checkpoints.vocabularies import read_json
from isoform.data.specials import SpecialIds

PARTS = ("pad", "bos", "eos", "unk")


class Names:
    """What ``tokenizer_config.json``, ``special_tokens_map.json`` and ``added_tokens.json`` say."""

    def __init__(self, folder: Path, table: Mapping[str, Any]) -> None:
        self.settings = read_json(folder / "tokenizer_config.json")
        self.tokens = read_json(folder / "special_tokens_map.json")
        self.table = table
        self._given = {**self.settings, **self.tokens}
        numbered: Mapping[str, Any] = self.settings.get("added_tokens_decoder") or {}
        self.added: dict[str, int] = {
            **{str(name): int(number) for name, number in read_json(folder / "added_tokens.json").items()},
            **{_content(token): int(number) for number, token in numbered.items()},
        }
        """Ids of tokens outside the vocabulary's own file, where a file says them."""

    def name(self, part: str) -> str | None:
        """The token that plays a part."""
        given = self._given.get(f"{part}_token")
        return None if given is None else _content(given)

    def special(self, look_up: Callable[[str], int | None], defaults: Mapping[str, str]) -> SpecialIds:
        """The ids of the parts that exist. A pad that is also another part is none."""
        ids: dict[str, Any] = {}
        for part in PARTS:
            name = self.name(part) or defaults.get(part)
            number = None if name is None else look_up(name)
            if number is None and isinstance(self.table.get(f"{part}_token_id"), int) and name is None:
                number = self.table[f"{part}_token_id"]
            if number is not None:
                ids[part] = number
        if ids.get("pad") in (ids.get("eos"), ids.get("bos"), ids.get("unk")):
            ids.pop("pad", None)
        return SpecialIds(**ids)


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)
