"""Estimates the savings of a cache of a given size: traces, and their replay on the engine without payloads."""
