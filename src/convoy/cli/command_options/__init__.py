"""Options of single commands, a file a command; options that several commands have are in `convoy.cli.options`."""
