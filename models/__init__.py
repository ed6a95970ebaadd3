"""Layers, dispatch policy, weights and layout plans; builders are found through a hook."""
