"""One module for each command; importing it adds the command to `excite.cli.shared.app`."""
