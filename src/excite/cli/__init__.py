"""The command line: `commands` has one module for each command, `app` the entry point, `shared` what several commands use."""
