"""Do shared weights stay shared, and does a saved model come back as the same function? (R27, R38)"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isoform.verify.audit.report import Check, one_line
from isoform.verify.noise import largest_difference, tolerance
from isoform.verify.subject import Subject


def tied_groups(module: nn.Module) -> list[tuple[str, ...]]:
    """Names of parameters that are one tensor."""
    groups: dict[tuple[int, int], list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault((parameter.data_ptr(), parameter.numel()), []).append(name)
    return [tuple(dict.fromkeys(names)) for names in groups.values() if len(set(names)) > 1]


def reloaded(module: nn.Module) -> tuple[nn.Module, str]:
    """The module after a save and a load by its own means, and what those were."""
    if hasattr(module, "save_pretrained") and hasattr(type(module), "from_pretrained"):
        return _by_their_own(module), "save_pretrained and from_pretrained"
    from isoform.nn import Transformer

    if isinstance(module, Transformer):
        from isoform.checkpoints import Bundle, load
        from isoform.config.protocol import Protocol

        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "artifact"
            Bundle(module, module.config, None, None, Protocol(pad_id=0, eos_ids=()), {}).save(place)
            again = load(place, dtype=next(module.parameters()).dtype).model
            return again.eval(), "an artifact"
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()  # what the state does not restore stays visibly wrong
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "state.pt"
        torch.save(module.state_dict(), place)
        twin.load_state_dict(torch.load(place, weights_only=True))
    return twin, "state_dict and load_state_dict"


def _by_their_own(module: Any) -> nn.Module:
    """Hugging Face's way, with the module's own kernel and number formats, which no file holds."""
    kernel = getattr(module.config, "_attn_implementation", None)
    settings: dict[str, Any] = {} if kernel is None else {"attn_implementation": kernel}
    with tempfile.TemporaryDirectory() as folder:
        module.save_pretrained(folder)
        again = type(module).from_pretrained(folder, local_files_only=True, torch_dtype="auto", **settings)
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, value in (*again.named_parameters(), *again.named_buffers()):
        if name in own:
            value.data = value.data.to(own[name].dtype)
    return again.eval()


def declared_tie(module: nn.Module) -> bool | None:
    """Whether the module's configuration says that its head is tied; None where it says nothing."""
    config: Any = getattr(module, "config", None)
    head: Any = getattr(config, "head", None)
    if hasattr(head, "tied"):
        return bool(head.tied)
    flag = getattr(config, "tie_word_embeddings", None)
    return flag if isinstance(flag, bool) else None


def check_ties(subject: Subject) -> Check:
    """Shared tensors are shared as declared, and still are after a save and a load."""
    name, module = "ties", subject.module
    groups = tied_groups(module)
    declared = declared_tie(module)
    head = _output_and_input_tables(module)
    if declared and head is not None and head[0].data_ptr() != head[1].data_ptr():
        gap = largest_difference(head[0], head[1]) if head[0].shape == head[1].shape else float("inf")
        text = "the configuration says that head and embedding are tied, but they are two tensors"
        return Check(name, False, f"{text} that differ by {gap:.3g}", {"difference": gap})
    if not groups:
        return Check(name, None, "no parameter is shared")
    try:
        again, how = reloaded(module)
    except Exception as error:
        return Check(name, None, f"it cannot be saved and loaded: {one_line(error)}")
    after = tied_groups(again)
    lost = [g for g in groups if not any(set(g) <= set(a) for a in after)]
    evidence = {"before": [list(g) for g in groups], "after": [list(g) for g in after], "by": how}
    if lost:
        return Check(name, False, f"shared before, separate after {how}: {' = '.join(lost[0])}", evidence)
    return Check(name, True, f"{len(groups)} shared groups stay shared through {how}", evidence)


def check_reload(subject: Subject) -> Check:
    """After a save and a load the same input gives the same output and the same first tokens."""
    name = "reload"
    try:
        again, how = reloaded(subject.module)
    except Exception as error:
        return Check(name, None, f"it cannot be saved and loaded: {one_line(error)}")
    # Both with the same listeners, for fused paths are left where modules have some.
    before, after = subject.run().output, Subject(again.eval(), subject.kwargs).run().output
    if after.shape != before.shape:
        return Check(
            name, False, f"after {how} the output has shape {list(after.shape)}, before {list(before.shape)}"
        )
    gap = largest_difference(before, after)
    first = before[:, -1].argmax(-1), after[:, -1].argmax(-1)
    evidence = {"by": how, "largest_difference": gap, "first_tokens_equal": bool(torch.equal(*first))}
    if gap > min(tolerance(before), tolerance(before.float())):
        return Check(name, False, f"after {how} the output differs by {gap:.3g}", evidence)
    return Check(
        name,
        True,
        f"after {how} the output is equal {'within ' + format(gap, '.2g') if gap else 'to the bit'}",
        evidence,
        "that weights, buffers and settings survive",
        "tokenizer and generation settings",
    )


def _output_and_input_tables(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Head and embedding: by the module's own word, else the only two parameters with a row a token."""
    getters = (getattr(module, "get_output_embeddings", None), getattr(module, "get_input_embeddings", None))
    if not all(callable(g) for g in getters):
        size = getattr(getattr(module, "config", None), "vocab_size", None)
        tables = [p for p in module.parameters() if p.dim() == 2 and p.shape[0] == size]
        return (tables[0], tables[1]) if len(tables) == 2 and tables[0].shape == tables[1].shape else None
    head, table = (g() for g in getters)  # pyright: ignore[reportOptionalCall]
    if head is None or table is None or not hasattr(head, "weight") or not hasattr(table, "weight"):
        return None
    return head.weight, table.weight
