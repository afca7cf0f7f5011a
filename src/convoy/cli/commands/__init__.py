"""The commands, one file a command; `convoy.cli.app` names them."""
