"""The cache's identity: a description of everything that must be equal for cached bytes to be interchangeable."""
