"""The stages of a conversion. Each is a function of a student, a text and a schedule, and says how it is run."""
