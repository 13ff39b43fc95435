"""Lightning callbacks, each with a key of its own in the configuration."""
