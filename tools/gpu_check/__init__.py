"""The first minutes of undercroft on a GPU: is it right, how fast is it, and does it hold up the model."""
