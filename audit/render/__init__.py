"""Reports as text, Markdown and JSON."""
