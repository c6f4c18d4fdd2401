"""Two networks on the same data, held against each other (R35)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from isoform.errors import DataError
from isoform.evaluation.run import Evaluation
from isoform.evaluation.score import Bootstrap, Counted, PairedTest, paired


@dataclasses.dataclass(frozen=True)
class SideBySide:
    """What two evaluations say together.

    Attributes:
        tests: by name of metric.
        untested: by name of metric, why the two figures cannot be held against each other.
    """

    tests: Mapping[str, PairedTest]
    untested: Mapping[str, str]


def side_by_side(first: Evaluation, second: Evaluation, bootstrap: Bootstrap) -> SideBySide:
    """Test every metric that both were scored by, on the same resampled data.

    Raises:
        DataError: they were not scored on the same texts.
    """
    inputs = [[(item.input, item.references) for item in found.items] for found in (first, second)]
    if inputs[0] != inputs[1]:
        raise DataError("the two networks were not scored on the same texts")
    tests: dict[str, PairedTest] = {}
    untested: dict[str, str] = {}
    for name in (*first.counted, *(n for n in second.counted if n not in first.counted)):
        one, two = first.counted.get(name), second.counted.get(name)
        if one is None or two is None:
            untested[name] = f"only of the {'second' if one is None else 'first'} network"
        elif name == "nll" and _other_tokens(one, two):
            untested[name] = "the networks predict other tokens; bits_per_byte can be compared"
        else:
            tests[name] = paired(one, two, bootstrap)
    return SideBySide(tests, untested)


def _other_tokens(one: Counted, two: Counted) -> bool:
    return not np.array_equal(one.counts[:, 1], two.counts[:, 1])
