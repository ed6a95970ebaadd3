"""Between the parent and the process of a check: the channel, its events and their rows."""
