"""The library itself: other tests are left out where there is none, so that this one must not be."""

from __future__ import annotations

import pytest
import torch

from isoform.native import library
from isoform.native.library import _compiler


@pytest.mark.skipif(_compiler() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_there_is_a_compiler_for_is_compiled(dtype):
    assert library(dtype) is not None
