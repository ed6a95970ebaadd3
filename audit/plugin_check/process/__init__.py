"""The processes of ``muster plugin check``: the work, its supervisor, and the parent's end."""
