"""Layers, dispatch policy, weights and layout plans. Builders are found through a hook."""
