"""The steps of ``muster plugin check``."""
