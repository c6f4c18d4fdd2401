"""The ids that play a part in training and generation, each named, none guessed (R44)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from isoform.data.tokenizer_config import Specials
from isoform.errors import TokenizerError


@dataclasses.dataclass(frozen=True)
class SpecialIds:
    """Ids of the special tokens; None where a vocabulary has no such token.

    Attributes:
        pad: fills up rows; never the end of a sequence.
        bos: starts a sequence.
        eos: ends a sequence.
        unk: stands for what the vocabulary cannot say.
        extra: further atomic tokens by name, e.g. language tags or a mask.
    """

    pad: int | None = None
    bos: int | None = None
    eos: int | None = None
    unk: int | None = None
    extra: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        if self.pad is not None and self.pad == self.eos:
            raise TokenizerError(f"pad and eos are both id {self.pad}; pad is never eos")
        if self.pad is not None and self.pad in (self.bos, self.unk):
            raise TokenizerError(f"pad is id {self.pad}, and so is another special token")
        for name, value in self.named().items():
            if value < 0:
                raise TokenizerError(f"special token {name} has id {value}, expected 0 or more")

    @classmethod
    def find(cls, names: Specials, look_up: Callable[[str], int | None], where: str) -> SpecialIds:
        """Look the configured names up in a vocabulary.

        Raises:
            TokenizerError: the vocabulary has no such token.
        """

        def one(part: str, name: str, hint: str = "") -> int:
            found = look_up(name)
            if found is None:
                raise TokenizerError(f"{where}: no token {name!r}, which is to be {part}{hint}")
            return found

        parts = {"pad": names.pad, "bos": names.bos, "eos": names.eos, "unk": names.unk}
        ids = {
            part: None if name is None else one(part, name, f'; give its name, or {part} = "none"')
            for part, name in parts.items()
        }
        return cls(**ids, extra={name: one("an extra token", name) for name in names.extra})

    def named(self) -> dict[str, int]:
        """All that exist, by part or name."""
        parts = {"pad": self.pad, "bos": self.bos, "eos": self.eos, "unk": self.unk}
        return {**{name: value for name, value in parts.items() if value is not None}, **self.extra}

    def silent(self) -> frozenset[int]:
        """Ids that stand for no text: all but the unknown token, which stands for some."""
        return frozenset(self.named().values()) - {self.unk}

    def require(self, part: str) -> int:
        """The id of ``"pad"``, ``"bos"``, ``"eos"``, ``"unk"`` or an extra token.

        Raises:
            TokenizerError: there is none.
        """
        found = self.named().get(part)
        if found is None:
            raise TokenizerError(
                f"the tokenizer has no {part} token, which is needed here; name one in its specials"
            )
        return found
