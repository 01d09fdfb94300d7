"""The stages of a conversion. Each is a function that trains a student on a text by a schedule."""
