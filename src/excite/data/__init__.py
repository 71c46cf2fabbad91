"""Datasets: built in, downloaded and verified, synthetic."""

from excite.data.dataset import Dataset
from excite.data.fetching import cache_folder, fetch
from excite.data.loading import BUILT_IN, DOWNLOADED, NAMES, load

__all__ = ["BUILT_IN", "DOWNLOADED", "NAMES", "Dataset", "cache_folder", "fetch", "load"]
