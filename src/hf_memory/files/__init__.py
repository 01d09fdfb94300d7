"""Files and folders: texts as tokens, and folders that one process at a time writes to."""
