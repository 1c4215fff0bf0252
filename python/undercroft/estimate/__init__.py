"""What a cache of some size would have saved: traces, and their replay on the engine without payloads."""
