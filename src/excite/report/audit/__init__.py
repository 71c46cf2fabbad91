"""One page on a trained model: how rich its layers are, which theorems speak about it, how steep and how robust it is."""

from excite.report.audit.result import Audit
from excite.report.audit.run import audit

__all__ = ["Audit", "audit"]
