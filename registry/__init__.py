"""What a kernel is, who provides it, how it is found, launched and recorded."""
