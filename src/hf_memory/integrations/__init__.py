"""Our models inside other programs, which import these modules themselves."""
