"""Audit of a trained model: richness of its layers, theorems that apply, Lipschitz constants, margins."""

from excite.report.audit.result import Audit
from excite.report.audit.run import audit

__all__ = ["Audit", "audit"]
