"""Processes that take many trainings, one after the other."""
