"""The `midus` command: thin shells over functions anyone can import."""
