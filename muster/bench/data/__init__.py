"""Inputs of measurements: weights, routings, shapes, and the launches of a decode step."""
