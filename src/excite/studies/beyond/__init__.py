"""Studies that go beyond the papers."""
