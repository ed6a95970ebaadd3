"""Layers, dispatch policy and builders of models."""
