"""What trained models hold, measured on any saved checkpoint."""
