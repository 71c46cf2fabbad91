"""The arguments of the training methods choose a target; arguments of another target are refused."""

import pytest

from excite.errors import InputError
from excite.excitation.targets.binary import Binary
from excite.excitation.targets.choose import choose_target, tokens_target, values_target
from excite.excitation.targets.codes import Codes
from excite.excitation.targets.tokens import Tokens
from excite.excitation.targets.values import Values


def test_classes_choose_codes():
    assert isinstance(choose_target(None, 0.3, "squared"), Binary)
    assert isinstance(choose_target(3, None, "squared"), Codes)
    with pytest.raises(InputError, match="nearest code"):
        choose_target(3, 0.3, "squared")


def test_values_take_no_setting_of_classifiers():
    assert isinstance(values_target(None, None, None, "squared"), Values)
    for arguments in ((3, None, None, "squared"), (None, [0, 1], None, "squared"), (None, None, 0.5, "squared")):
        with pytest.raises(InputError, match="is a regression"):
            values_target(*arguments)
    with pytest.raises(InputError, match="squared error only"):
        values_target(None, None, None, "cross-entropy")


def test_tokens_need_the_cross_entropy_and_nothing_else():
    target = tokens_target("next-token", "prompt", -1, "cross-entropy", {})
    assert isinstance(target, Tokens)
    assert (target.shift, target.perturbed, target.ignore_index) == (True, "prompt", -1)
    for loss, unused, message in (
        ("squared", {}, "cross-entropy only"),
        ("cross-entropy", {"classes": 3}, "leave one of the two out"),
    ):
        with pytest.raises(InputError, match=message):
            tokens_target("tokens", "all", -100, loss, unused)
