"""The object behind `excite.watch`, its clock, and what happens with probes that raise."""

from excite.monitor.watcher.settings import WatchSettings
from excite.monitor.watcher.watcher import Watch

__all__ = ["Watch", "WatchSettings"]
