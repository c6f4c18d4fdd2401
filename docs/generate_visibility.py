"""Write ``docs/visibility.md``: the prose below, with every block of code run and its output shown.

python docs/generate_visibility.py
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).parent / "visibility.md"

TEXT = '''# Who may read whom

<!-- Made by docs/generate_visibility.py, which runs every block of code and shows what it prints. Do not edit. -->

A stack of layers does not say who may read whom; a **visibility** does. It is a value apart from the modules: the
same parameters run as an encoder, a causal decoder or a prefix decoder under another rule (R18). A rule compares
*places*: how many real tokens stand before a token in its row. It becomes a matrix only when asked for one, and
it prints as a grid: queries downwards, keys across, ■ may be read, · may not.

## The four kinds

**Bidirectional**: every position reads every other (6.32). Encoders.

```python
from isoform.visibility import *
print(Bidirectional().on(4))
```

**Causal**: a position reads itself and what precedes it (6.32). Decoders.

```python
print(Causal().on(4))
```

**Prefix**: the condition reads all of itself, the rest reads what precedes it (6.33). How long the condition is
belongs to each row, not to the network: `Tokens(ids, real, prefix=…)`.

```python
print(Prefix().on(Places.range(6, prefix=3)))
```

**Cross**: every target position reads every source position. T × S, and no triangle (R21).

```python
print(Cross().on(4, 6))
```

## What combines with them

Rules combine with `&`: all of them must allow. A network's own rule is that of its configuration with padding and
documents; a layer with a window adds it.

**Padding** is not read and reads nothing, on whichever side it is. `real` is True for a real token, everywhere in
this library.

```python
from isoform import Tokens
rows = [[5, 6, 7, 8, 9], [5, 6, 7]]
for side in ("right", "left"):
    places = Places.of(Tokens.from_lists(rows, pad_id=0, side=side))
    print(f"padded on the {side}, second row:")
    print((Causal() & Padding()).on(places).grid(row=1))
```

Places count real tokens alone, so the two are one function: the rows above with a ■ in them are the same triangle.

**Documents** packed into one row do not see each other, and positions start anew in each.

```python
import torch
packed = Tokens(torch.arange(6)[None], documents=torch.tensor([[1, 1, 2, 2, 2, 3]]))
print((Causal() & Documents()).on(Places.of(packed)))
print(packed.positions().tolist())
```

**Windows** hold the query's own position: `Window(3, "past")` is itself and two before, `Window(3, "both")` two on
either side.

```python
print((Causal() & Window(3, "past")).on(6))
print()
print((Bidirectional() & Window(2, "both")).on(6))
```

**A streaming source**: under wait-k, target position i (from 0) reads the first i + k source positions.
`model(tokens, source=…, cross=WaitK(2) & Padding())` runs a network under it.

```python
print((Cross() & WaitK(2)).on(4, 6))
```

A rule of one's own is a class with one method, `reads(query, key)`, elementwise over places; it combines,
prints and lowers as the others do.

```python
class Strided(Visibility):
    """Every second position back (Child et al. 2019)."""

    def reads(self, query, key):
        return (query.index - key.index) % 2 == 0

print((Causal() & Strided()).on(6))
```

## One rule for a full pass and a cached step

Causal order compares absolute places. A step that continues a cache of four tokens asks the same rule for one row,
and gets the last row of the full matrix: there is no second rule for decoding that could disagree (R32).

```python
step = Places(torch.tensor([[4]]))
print(Causal().on(step, Places.range(5)))
print()
print(Causal().on(5))
```

## Which way True points

Libraries do not agree on what a mask's True means, and a mask the wrong way round has the right shape. Here the
direction is the type (R22): `Allowed` (True may read), `Forbidden` (True must not), `Additive` (0 may read, -inf
must not). One is not accepted for another, and every conversion has a name.

```python
allowed = Causal().on(3)
print(allowed.matrix.int().tolist(), "Allowed")
print(allowed.forbidden().matrix.int().tolist(), "Forbidden")
print(allowed.additive(torch.float32).matrix.tolist(), "Additive")
try:
    allowed & allowed.forbidden()
except TypeError as error:
    print("TypeError:", error)
try:
    Additive(allowed.matrix.float())
except Exception as error:
    print(f"{type(error).__name__}:", error)
```

| what takes it | True or 0 means | conversion |
|---|---|---|
| `torch.nn.functional.scaled_dot_product_attention` | True: takes part | `allowed.sdpa()` |
| `torch.nn.MultiheadAttention(attn_mask=…)` | True: must **not** be read; heads folded into rows | `allowed.multihead(n_heads)` |
| `torch.nn.…(key_padding_mask=…)` | True: padding | `~tokens.real` |
| Hugging Face, two-dimensional `attention_mask` | 1: a real token | `from_key_padding(mask.bool(), queries)` |
| Hugging Face, four-dimensional, additive | 0: may be read; the dtype's lowest number: not | `allowed.hugging_face(dtype)` |

`is_causal` is asked of the matrix, never believed:

```python
print(Causal().on(4).is_causal(), (Causal() & Window(2, "past")).on(4).is_causal(), Causal().on(2, 4).is_causal())
```

## What reaches the kernels

A network never builds the matrix where something cheaper is *equal to it* at every query. `rule.lower(query, key)`
finds what that is; the tests compare it with the matrix for rules and paddings drawn at random.

```python
def forms(name, rule, tokens):
    places = Places.of(tokens)
    lowered = rule.lower(places, places)
    mask = None if lowered.mask is None else list(lowered.mask.shape)
    alive = None if lowered.alive is None else list(lowered.alive.shape)
    print(f"{name:34} is_causal={lowered.is_causal!s:6} mask={mask!s:15} alive={alive}")

full = Tokens(torch.ones(2, 5, dtype=torch.long))
right, left = (Tokens.from_lists(rows, pad_id=0, side=side) for side in ("right", "left"))
forms("bidirectional, no padding", Bidirectional() & Padding(), full)
forms("bidirectional, padded", Bidirectional() & Padding(), right)
forms("causal, no padding", Causal() & Padding(), full)
forms("causal, padded on the right", Causal() & Padding(), right)
forms("causal, padded on the left", Causal() & Padding(), left)
forms("causal, window", Causal() & Window(3, "past") & Padding(), full)
forms("causal, window longer than the row", Causal() & Window(9, "past") & Padding(), full)
```

With padding on the right, the triangle alone already hides it from every real query, so nothing is added to the
scores; a mask over keys has one row for all queries. FlexAttention gets the rule itself as a function of indices
(`rule.mask_mod`), and no matrix of single places is kept.

## A row that sees nothing

Padded queries read nothing, and so does every target of a source that is all padding. Softmax over no keys is 0/0; here
such a row gives zeros, in values and in gradients, on every backend (R4). `alive` above says which rows are left.

```python
import isoform as iso
model = iso.build(iso.presets.bert(20, d_model=8, n_heads=2, ffn_width=16, n_layers=1), seed=0)
nothing = Tokens(torch.tensor([[3, 4, 5], [6, 7, 8]]), torch.tensor([[True] * 3, [False] * 3]))
with iso.capture(model, "encoder.layers.0.attention.body.context") as seen:
    model(nothing).hidden.sum().backward()
print(seen["encoder.layers.0.attention.body.context"][1].abs().max().item())
print(all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters()))
```

## Supervision follows visibility

Under a prefix mask, a position inside the condition reads the token after it, which is its own label. With six tokens
and a condition of three, positions 1 and 2 leak (exercise 6.7, counted from 1); the library supervises the others,
and refuses a set of labels that leaks (R23).

```python
from isoform.training.loss import check_supervision
try:
    check_supervision(torch.tensor([[True, True, True, True, True, False]]), 3)
except Exception as error:
    print(f"{type(error).__name__}:", error)
```
'''


def run(code: str, names: dict[str, object]) -> str:
    """Execute a block and give what it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "docs/visibility.md", "exec"), names)
    return out.getvalue().rstrip()


def render() -> str:
    """The page."""
    names: dict[str, object] = {"__name__": "visibility"}

    def shown(match: re.Match[str]) -> str:
        printed = run(match[1], names)
        return match[0] + (f"\n\n```\n{printed}\n```" if printed else "")

    return re.sub(r"```python\n(.*?)```", shown, TEXT, flags=re.S)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
