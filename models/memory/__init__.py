"""Arrays of a model: device memory, state of sequences, scratch."""
