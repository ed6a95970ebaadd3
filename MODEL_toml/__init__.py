"""Model manifests: the shipped ones, their schema and their loader."""
