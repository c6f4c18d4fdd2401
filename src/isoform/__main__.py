"""``python -m isoform``."""

from __future__ import annotations

import sys

from isoform.cli import main

sys.exit(main())
