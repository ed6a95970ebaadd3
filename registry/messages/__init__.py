"""Sentences as data: a template's name, the values that fill it, and one table of templates for each audience.

A finding carries messages. Its text is made here and nowhere else: :mod:`command` holds the wording of the command
line, and every other audience has a short table of the sentences that differ for it.
"""
