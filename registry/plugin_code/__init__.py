"""Run, copy and hash code that plugins bring."""
