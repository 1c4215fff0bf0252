"""The savings of a cache of some size: traces, and their replay on the engine without payloads."""
