"""Traces of any engine, and their audit."""
