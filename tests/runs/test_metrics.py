"""The table of metrics."""

import pytest

from excite.errors import ExciteError
from excite.runs import Run


def test_many_rows_are_one_transaction_or_nothing(tmp_path):
    with Run.create(tmp_path / "run", {}) as run:
        before = run._metrics.commits
        run.log_many([(1, {"loss/step": 1.0}), (2, {"loss/step": 0.5, "rank/share/fc1": 0.25})])
        assert run._metrics.commits == before + 1
        with pytest.raises(ExciteError, match="expected"):
            run.log_many([(3, {"loss/step": 0.1}), (4, {"loss/step": "small"})])
        assert run.series("loss/step")[0].tolist() == [1, 2]
