"""Measures of a grown model: is it equal to its base, is it better."""
