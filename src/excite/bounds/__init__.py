"""What theory promises: one function a theorem, each returns a `Bound` with its assumptions checked."""

from excite.bounds.bound import Assumption, Bound

__all__ = ["Assumption", "Bound"]
