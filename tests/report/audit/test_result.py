"""The result of an audit as values and as a file."""

import json

import pytest

from excite.report.audit import audit
from excite.runs import Run

from .conftest import QUICK


def test_what_it_returns_can_be_stored(folder, tmp_path):
    found = audit(folder, margin_points=1)
    again = json.loads(json.dumps(found.to_dict()))
    assert again["layers"][0]["effective_rank"] == float(found.layers["1"].covariance.effective_rank)
    assert again["bounds"][0]["value"] == found.theorems[0].bound.value
    found.keep(folder)
    assert Run.open(folder).read_json("audit") == again


def test_earlier_names_of_an_audit_still_work(folder):
    found = audit(folder, units=False, **QUICK)
    for old, new in {"promises": "theorems", "silent": "not_applicable", "steepness": "lipschitz"}.items():
        with pytest.warns(DeprecationWarning, match=new):
            assert getattr(found, old) is getattr(found, new)
