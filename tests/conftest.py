"""One thread for each of several test processes and what they start: they share the cores. Property tests try
the same examples at every run; ``HYPOTHESIS_PROFILE=explore`` looks for new ones."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported

# What is compiled here is kept between runs, apart from what users have compiled. No test depends on whether
# that is there already.
os.environ["ISOFORM_COMPILE"] = "never"
os.environ["ISOFORM_CACHE"] = str(Path(tempfile.gettempdir()) / f"isoform-tests-{os.getuid()}")

settings.register_profile("fixed", derandomize=True)
settings.register_profile("explore")
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
