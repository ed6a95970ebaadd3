"""``muster plugin check``: all steps of the kernel author's kit."""
