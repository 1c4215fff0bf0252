"""The requests' own wishes: hints, fields, explanations."""
