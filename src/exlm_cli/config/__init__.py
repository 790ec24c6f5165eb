"""Recipes of every command: their keys, and how they are read and checked. No torch."""
