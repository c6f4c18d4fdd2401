"""Is it the same function, where do two part, why, and does one alone keep its promises?"""

from isoform.verify.assertions import (
    assert_batch_independent,
    assert_cache_exact,
    assert_causal,
    assert_equivalent,
    assert_padding_isolated,
)
from isoform.verify.audit import AuditReport, Check, audit
from isoform.verify.compare import compare
from isoform.verify.comparison import Comparison, Row
from isoform.verify.diagnose import Diagnosis, Finding, Place, diagnose
from isoform.verify.dump import Dump, read_dump
from isoform.verify.inputs import example_inputs
from isoform.verify.record import Recording, record
from isoform.verify.trace import Trace, trace

__all__ = [
    "AuditReport",
    "Check",
    "Comparison",
    "Diagnosis",
    "Dump",
    "Finding",
    "Place",
    "Recording",
    "Row",
    "Trace",
    "assert_batch_independent",
    "assert_cache_exact",
    "assert_causal",
    "assert_equivalent",
    "assert_padding_isolated",
    "audit",
    "compare",
    "diagnose",
    "example_inputs",
    "read_dump",
    "record",
    "trace",
]
