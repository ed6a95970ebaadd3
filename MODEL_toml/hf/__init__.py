"""The ``config.json`` of a Hugging Face checkpoint: one reader, one table of fields, one comparison with a manifest."""
