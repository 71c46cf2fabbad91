import pytest

import excite
from excite.wiring.groups import named
from excite.wiring.junctions import junctions
from models import CASES, build


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != "papers"])
def test_names_are_distinct(name):
    """Metrics are stored by these names: two items of one name would overwrite each other."""
    model, x = build(name)
    wiring = excite.trace(model, x, output=CASES[name].pick)
    for names in (
        [layer.name for layer in wiring.layers],
        [junction.name for junction in junctions(wiring)],
        [law for law, _ in named(group for group in wiring.groups if group.producers)],
    ):
        assert len(set(names)) == len(names)


def test_junctions_of_the_same_layers_are_numbered_by_channels():
    model, x = build("heads")
    found = {junction.name: junction for junction in junctions(excite.trace(model, x))}
    assert list(found) == ["query>key/head0", "query>key/head1", "value>out/head0", "value>out/head1", "out>head"]
    assert found["value>out/head1"].before[0].index == ((4,), (5,), (6,), (7,))
    model, x = build("halves")
    found = {junction.name: junction for junction in junctions(excite.trace(model, x))}
    assert list(found) == ["first>second/part0", "first>second/part1"]


def test_a_junction_with_its_own_layers_is_named_after_them():
    model, x = build("resnet-free")
    names = [junction.name for junction in junctions(excite.trace(model, x))]
    assert "block1.conv2+block1.skip>block2.conv1+block2.skip" in names
    assert not any("/" in name for name in names)
