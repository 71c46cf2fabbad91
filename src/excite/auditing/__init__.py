"""One page on a trained model: how rich its layers are, which theorems speak about it, how steep and how robust it is."""

from excite.auditing.look import audit
from excite.auditing.result import Audit

__all__ = ["Audit", "audit"]
