"""Our models inside other programs, and the ops and caches of this package inside models of transformers."""
