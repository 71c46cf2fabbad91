"""Helpers on top of torch and numpy that all packages use."""
