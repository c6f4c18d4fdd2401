"""Is it the same function, where do two part, why, and does one alone keep its promises?"""

from isoform.verify.audit import AuditReport, Check, audit

__all__ = ["AuditReport", "Check", "audit"]
