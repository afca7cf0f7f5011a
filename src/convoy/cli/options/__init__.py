"""Options: those of single commands in a file a command, those that several share in `shared`; and how words become values."""
