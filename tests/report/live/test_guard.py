"""Which host names the live page answers to."""

import pytest

from excite.report.live.guard import is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"])
def test_loopback_addresses(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "example.org", "192.168.0.7", ""])
def test_addresses_that_others_can_reach(host):
    assert not is_loopback(host)
