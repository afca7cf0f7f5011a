"""The IR: a net as plain data, its specification (verify) and its text form. No torch here."""
