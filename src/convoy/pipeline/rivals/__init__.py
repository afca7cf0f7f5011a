"""Other plans for a net that meet the selected one in turn: the net as one program, and other selections."""
